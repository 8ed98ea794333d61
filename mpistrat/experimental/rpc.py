"""The names of ``tf.distribute.experimental.rpc``, which listens on a port, as nothing does here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn


def _refuse(name: str, rpc_layer: str = "grpc") -> NoReturn:
    if rpc_layer != "grpc":
        raise ValueError(f"the only rpc_layer of tf.distribute is 'grpc', not {rpc_layer!r}")
    raise NotImplementedError(
        f"rpc.{name}.create would listen on a port of the cluster's network, or connect to one. To call functions on "
        "other ranks use mpistrat.coordinator.ClusterCoordinator.schedule, whose messages MPI carries"
    )


class RpcServer:
    """A server of calls. Cannot be created: use `mpistrat.coordinator.ClusterCoordinator`.

    Examples
    --------
    >>> import mpistrat
    >>> mpistrat.experimental.rpc.Server.create("grpc", "localhost:2222")
    Traceback (most recent call last):
    NotImplementedError: ...
    """

    def __init__(self) -> None:
        _refuse("Server")

    @staticmethod
    def create(rpc_layer: str, address: str) -> RpcServer:
        """Raise NotImplementedError, which says what to use; ValueError for an unknown ``rpc_layer``."""
        _refuse("Server", rpc_layer)

    def register(self, method_name: str, func: Callable[..., Any]) -> None:
        """Add a method to the server."""

    def start(self) -> None:
        """Start to serve."""


class Client:
    """A client of an `RpcServer`. Cannot be created: use `mpistrat.coordinator.ClusterCoordinator`.

    Examples
    --------
    >>> import mpistrat
    >>> mpistrat.experimental.rpc.Client.create("grpc", "localhost:2222")
    Traceback (most recent call last):
    NotImplementedError: ...
    """

    def __init__(self) -> None:
        _refuse("Client")

    @staticmethod
    def create(rpc_layer: str, address: str, name: str = "", timeout_in_ms: int = 0) -> Client:
        """Raise NotImplementedError, which says what to use; ValueError for an unknown ``rpc_layer``."""
        _refuse("Client", rpc_layer)

    def call(
        self, method_name: str, args: Sequence[Any] | None = None, output_specs: Any = None, timeout_in_ms: int = 0
    ) -> Any:
        """Call a method of the server."""


Server = RpcServer
__all__ = ["Client", "Server"]
