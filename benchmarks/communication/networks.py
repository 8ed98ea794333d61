"""The shapes of the parameters of known networks, from their publications."""

from __future__ import annotations

from collections.abc import Iterator

Shape = tuple[int, ...]


def resnet50() -> list[Shape]:
    """Return ResNet-50 (He et al. 2016, table 1, shortcuts B) with scale and shift after each convolution.

    Examples
    --------
    >>> import math
    >>> shapes = resnet50()
    >>> len(shapes), sum(map(math.prod, shapes))
    (161, 25557032)
    """
    return list(_resnet((3, 4, 6, 3), classes=1000))


def _resnet(blocks: tuple[int, ...], classes: int) -> Iterator[Shape]:
    yield from _convolution(7, 3, 64)
    width = 64
    for stage, repeats in enumerate(blocks):
        inner = 64 << stage
        for block in range(repeats):
            yield from _convolution(1, width, inner)
            yield from _convolution(3, inner, inner)
            yield from _convolution(1, inner, 4 * inner)
            if block == 0:
                yield from _convolution(1, width, 4 * inner)
            width = 4 * inner
    yield width, classes
    yield (classes,)


def _convolution(size: int, inputs: int, outputs: int) -> Iterator[Shape]:
    yield size, size, inputs, outputs
    yield (outputs,)
    yield (outputs,)


def bert_base() -> list[Shape]:
    """Return BERT-base, uncased (Devlin et al. 2019, section 3): the encoder and its pooler.

    Examples
    --------
    >>> import math
    >>> shapes = bert_base()
    >>> len(shapes), sum(map(math.prod, shapes))
    (199, 109482240)
    """
    width, vocabulary, positions, segments, layers = 768, 30522, 512, 2, 12
    shapes: list[Shape] = [(vocabulary, width), (positions, width), (segments, width), (width,), (width,)]
    for _ in range(layers):
        for _ in range(4):  # query, key, value, output
            shapes += [(width, width), (width,)]
        shapes += [(width,), (width,)]
        shapes += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
        shapes += [(width,), (width,)]
    return [*shapes, (width, width), (width,)]


NETWORKS = {"ResNet-50": resnet50, "BERT-base": bert_base}
