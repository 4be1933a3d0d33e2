"""The table of model families, families.json: plain data that tells how the config.json of each family is read.

families.py reads a config by its family's entry. `penstock models` and the page on models list the families by
catalogue.json, whose architectures name the entries here.
"""

from functools import reduce
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from penstock.executor.loading.arrangement import Arrangement
from penstock.executor.loading.fields import Fields

# Values for fields of a spec: a constant or, for numbers and flags, as text the name of a field of the config. Of several
# names, joined by " or ", the first that the config has is read.
Values = dict[str, bool | int | float | str | tuple[str, ...]]


class LayerPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rotation and the windows of a family's layers. With `full_every` or `full_first`, some layers have full
    attention, those that `layer_types` lists if the config has it; without both, all layers have the window."""

    rotated_part: float | None = None  # of a head, if the config has no partial_rotary_factor; None: always the whole
    window: str = ""  # the field with the window; without it, all layers have full attention
    windows_if: str = ""  # the flag without which the window is ignored
    full_every: int | str | None = None  # of so many layers (or the field with it), the last is full; 0: none is
    full_first: str = ""  # the field with the number of first layers that are full
    has_two_ropes: bool = False  # layers with a window have a rotation of their own


class ExpertPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The experts of a family, and the fields that tell which layers have them; without these, all have."""

    values: Values  # of MoeSpec
    allowed: dict[str, tuple[Any, ...]] = {}  # as those of the family, for models that have experts
    num_shared: str = ""  # the field with the number of shared experts, each as large as the others
    first: str = ""  # the field with the index of the first layer with experts
    every: str = ""  # the field with a number of layers, of which the last has experts
    dense: str = ""  # the field with a list of layers without experts


class ModelFamily(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of the table: a family, or what several families share. It adds to the entries in `like`, key by key also
    within objects, and all add to the entry "base"."""

    like: tuple[str, ...] = ()
    reader: str = "read_family"  # the function that does what the table cannot express
    defaults: dict[str, Any] = {}  # values of fields that are absent or null; with null, a field has none
    defaults_unless_null: dict[str, Any] = {}  # values of absent fields, whose null means that the feature is off
    allowed: dict[str, tuple[Any, ...]] = {}  # supported values of fields; the first counts for an absent field
    values: Values = {}  # of DecoderSpec
    activation_field: str = "hidden_act"
    layers: LayerPlan = LayerPlan()
    experts: ExpertPlan | None = None
    latent: Values = {}  # of LatentSpec
    recurrent: Values = {}  # of the DeltaSpec, MambaSpec or ConvSpec of recurrent layers
    arrangement: Arrangement = Arrangement()
    has_neighbours: bool = False  # checkpoints store rotated pairs as neighbours, (2i, 2i + 1)

    def completed(self, fields: Fields) -> Fields:
        """Return the config with the family's defaults, and raise ExecutorError for values that are not supported."""
        others = {name: value for name, value in self.defaults_unless_null.items() if name not in fields.names()}
        own = fields.with_defaults(**self.defaults, **others)
        own.check(self.allowed)
        return own


def values_of(fields: Fields, spec: type, values: Values, highest: dict[str, int] | None = None) -> dict[str, Any]:
    """Return the values for fields of a spec: those of the config, or constants. A flag that the config omits is false, a
    number that may be None is None; other numbers are required. `highest` limits integers by their name in the spec."""
    found: dict[str, Any] = dict(values)
    for field, kind in get_type_hints(spec).items():
        if not isinstance(names := values.get(field), str):
            continue
        name = present(fields, names)
        if kind is bool:
            found[field] = fields.flag(name, False)
        elif kind in (int | None, float | None) and name not in fields:
            found[field] = None
        elif kind in (int, int | None):
            found[field] = fields.integer(name, high=(highest or {}).get(field))
        elif kind in (float, float | None):
            found[field] = fields.number(name)
    return found


def present(fields: Fields, names: str) -> str:
    """Return the first of the names, joined by " or ", that the config has; the last if it has none."""
    *others, last = names.split(" or ")
    return next((each for each in others if each in fields), last)


def _read() -> dict[str, ModelFamily]:
    entries: dict[str, dict[str, Any]] = {}
    for name, own in msgspec.json.decode(Path(__file__).with_name("families.json").read_bytes()).items():
        entries[name] = reduce(_merged, (*(entries[each] for each in own.get("like", ())), own))
    return {name: msgspec.convert(_merged(entries["base"], own), ModelFamily) for name, own in entries.items()}


def _merged(shared: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    inner = {key: _merged(shared[key], own[key]) for key in shared.keys() & own if isinstance(own[key], dict)}
    return shared | own | inner


MODEL_FAMILIES = _read()
