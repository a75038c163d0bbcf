"""The initialisers of an exported ONNX model: taken from the plan folder's safetensors files, never through torch.

A safetensors file is a header and raw little-endian tensors, which is what ONNX calls external data; so an initialiser
is first a reference into that file, and its bytes move only when they must.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.files import cannot_write
from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.user_code import told

#: Bytes of weights up to which they are written into the .onnx file itself (a protobuf file holds 2 GB).
EMBED_LIMIT_BYTES = 1_500_000_000
_STAGE = re.compile(r"^stage\d+\.")


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    offset: int
    length: int


def attach_weights(
    model: Any, plan: Plan, folder: Path, path: Path, *, embed_limit_bytes: int = EMBED_LIMIT_BYTES
) -> None:
    """Name the initialisers of an ``onnx_ir`` model as the user's model does, and give them the plan's values.

    Without weights in the plan, parameters and buffers become inputs of the graph. Above ``embed_limit_bytes`` the
    weights stay outside the .onnx: in the plan folder itself if ``path`` lies there, else in ``<path>.data`` beside it.

    Raises:
        ArtifactError: HP411, the weights outside cannot be written; HP445, a weight is missing in the folder, or its
            file cannot be read.
    """
    import onnx_ir

    places = _places(folder)
    aliases = {alias: tensor.name for tensor in (*plan.parameters, *plan.buffers) for alias in tensor.aliases}
    for old_name, value in list(model.graph.initializers.items()):
        if not _STAGE.match(old_name):
            continue
        name = _STAGE.sub("", old_name)
        del model.graph.initializers[old_name]
        if name in model.graph.initializers:
            # A frozen parameter or constant that several stages hold.
            value.replace_all_uses_with(model.graph.initializers[name])
            continue
        value.name = name
        value.metadata_props.clear()
        place = places.get(name) or places.get(aliases.get(name, name))
        if place is not None:
            value.const_value = onnx_ir.ExternalTensor(
                place.path.name,
                place.offset,
                place.length,
                value.dtype,
                shape=value.shape,
                name=name,
                base_dir=place.path.parent,
            )
            model.graph.register_initializer(value)
        elif plan.weights:
            raise ArtifactError(
                "HP445", f"no weight '{name}'", where=str(folder / "weights.safetensors"), hint="compile again"
            )
        else:
            value.const_value = None
            model.graph.inputs.append(value)
    total = sum(tensor.const_value.nbytes for tensor in model.graph.initializers.values())
    if total <= embed_limit_bytes:
        onnx_ir.external_data.load_to_model(model)
    elif path.resolve().parent != folder.resolve():
        data = path.with_name(f"{path.name}.data")
        try:
            onnx_ir.external_data.unload_from_model(model, data.parent, data.name)
        except OSError as error:
            raise cannot_write(data, error) from error


def _places(folder: Path) -> dict[str, _Place]:
    places: dict[str, _Place] = {}
    for name in ("constants.safetensors", "weights.safetensors"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
        except (OSError, struct.error, ValueError, OverflowError, MemoryError) as error:
            raise ArtifactError(
                "HP445", f"cannot be read: {told(error)}", where=str(path), hint="compile again"
            ) from error
        for tensor, entry in header.items():
            if tensor != "__metadata__":
                start, end = entry["data_offsets"]
                places[tensor] = _Place(path, 8 + length + start, end - start)
    return places
