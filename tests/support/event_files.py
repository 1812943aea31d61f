"""TensorBoard's event files read without TensorBoard: records of a length, its checksum, an event, its checksum."""

import os

import mindspore  # noqa: F401  must come before protobuf
from tensorboardX.proto import event_pb2, plugin_hparams_pb2


def events_of(folder):
    """Returns the events of all event files in a folder, in the order in which they were written."""
    events = []
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), "rb") as file:
            content = file.read()
        position = 0
        while position < len(content):
            length = int.from_bytes(content[position : position + 8], "little")
            events.append(event_pb2.Event.FromString(content[position + 12 : position + 12 + length]))
            position += 12 + length + 4
    return events


def scalars_of(folder):
    """Returns {(tag, step): value}, without what a run that goes on earlier hides, as TensorBoard shows it."""
    return {place: value.simple_value for place, value in _values(folder).items() if value.HasField("simple_value")}


def texts_of(folder):
    """Returns {(tag, step): text} in the same way."""
    tensors = {place: value.tensor for place, value in _values(folder).items() if value.HasField("tensor")}
    return {place: tensor.string_val[0].decode("utf-8") for place, tensor in tensors.items()}


def hyperparameters_of(folder):
    """Returns {name: value} of a run's hyperparameters, and the tags by which TensorBoard compares runs."""
    found = {}
    for (tag, _), value in _values(folder).items():
        if tag.startswith("_hparams_/"):
            found[tag] = plugin_hparams_pb2.HParamsPluginData.FromString(value.metadata.plugin_data.content)
    started = found["_hparams_/session_start_info"].session_start_info.hparams
    tags = {metric.name.tag for metric in found["_hparams_/experiment"].experiment.metric_infos}
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in started.items()}, tags


def _values(folder):
    shown = {}
    for event in events_of(folder):
        if event.HasField("session_log"):
            shown = {(tag, step): value for (tag, step), value in shown.items() if step < event.step}
        shown.update({(value.tag, event.step): value for value in event.summary.value})
    return shown
