"""What files of TensorBoard hold, by the description of their format."""

import struct


def read(folder):
    """Yield (step, name, value) of each number in the files of a directory."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[12 + length + 4 :]
            for value in event.summary.value:
                yield event.step, value.tag, value.simple_value
