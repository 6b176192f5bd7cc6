"""tf.train.Example in the real protobuf library, from a description of it: what ours is compared with."""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_F = descriptor_pb2.FieldDescriptorProto


def _field(message: Any, name: str, number: int, kind: int, *, repeated: bool = False, type_name: str = "") -> Any:
    field = message.field.add(name=name, number=number, type=kind)
    field.label = _F.LABEL_REPEATED if repeated else _F.LABEL_OPTIONAL
    if type_name:
        field.type_name = type_name
    return field


def _build(name: str, *, packed: bool) -> Any:
    file = descriptor_pb2.FileDescriptorProto(name=f"{name}.proto", package=name, syntax="proto3")
    for list_name, kind in (("BytesList", _F.TYPE_BYTES), ("FloatList", _F.TYPE_FLOAT), ("Int64List", _F.TYPE_INT64)):
        field = _field(file.message_type.add(name=list_name), "value", 1, kind, repeated=True)
        if kind != _F.TYPE_BYTES:
            field.options.packed = packed
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (field_name, type_name) in enumerate(
        [("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List")], 1
    ):
        field = _field(feature, field_name, number, _F.TYPE_MESSAGE, type_name=f".{name}.{type_name}")
        field.oneof_index = 0
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    _field(entry, "key", 1, _F.TYPE_STRING)
    _field(entry, "value", 2, _F.TYPE_MESSAGE, type_name=f".{name}.Feature")
    _field(features, "feature", 1, _F.TYPE_MESSAGE, repeated=True, type_name=f".{name}.Features.FeatureEntry")
    _field(file.message_type.add(name="Example"), "features", 1, _F.TYPE_MESSAGE, type_name=f".{name}.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{name}.Example"))


Example = _build("packed", packed=True)
Unpacked = _build("unpacked", packed=False)
