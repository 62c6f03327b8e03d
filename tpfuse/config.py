"""``FusionConfig``: what the user asks for, and how it becomes "on" or "off" per fusion.

Two steps, kept apart. ``FusionConfig`` checks field names, types and ranges: it knows nothing of the machine.
``FusionConfig.resolve`` joins it with what this version, machine and model can do and gives a ``Resolved`` per fusion;
a fusion that was asked for by name and cannot be honoured is an error there, never a silent "off".
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tpfuse.errors import ConfigError

#: The lowest optimization level at which each fusion is on by itself.
FUSION_LEVELS: Mapping[str, int] = {
    "fuse_allreduce_rms": 1,
    "fuse_norm_quant": 1,
    "fuse_act_quant": 1,
    "fuse_act_padding": 1,
    "fuse_mla_dual_rms_norm": 1,
    "enable_qk_norm_rope_fusion": 1,
    "enable_sp": 2,
    "fuse_gemm_comms": 2,
    "fuse_rope_kvcache": 2,
    "fuse_attn_quant": 3,
}

#: Tuning fields, and the fusion that each of them tunes.
TUNED_FUSION: Mapping[str, str] = {
    "sp_min_token_num": "enable_sp",
    "fi_allreduce_fusion_max_size_mb": "fuse_allreduce_rms",
    "workspace_mb": "fuse_allreduce_rms",
    "peer_timeout_s": "fuse_allreduce_rms",
    "rope_kvcache_fusion_max_token_num": "fuse_rope_kvcache",
}

#: Environment variables: the first turns everything off, the second makes ranks compare their calls first, the third names
#: each call in profiles.
DISABLE_VARIABLE, DEBUG_VARIABLE, NVTX_VARIABLE = "TPFUSE_DISABLE", "TPFUSE_DEBUG", "TPFUSE_NVTX"

#: "key=value" at the start of a text, and what separates several of them (a value may hold commas of its own).
_SETTING, _SEPARATOR = re.compile(r"\s*\w+\s*=(?!=)"), re.compile(r"[,\s]+(?=\w+=)")
_TRUE, _FALSE, _NONE = ("1", "true", "on", "yes"), ("0", "false", "off", "no"), ("none", "null", "auto", "")


@dataclasses.dataclass(frozen=True)
class Resolved:
    """What became of one fusion of the configuration.

    on        whether its pass may rewrite
    explicit  whether the user named it, rather than leaving it to the level
    reason    why it is off, empty when it is on
    """

    on: bool
    explicit: bool
    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusionConfig:
    """Which fusions to apply. Immutable, keyword-only.

    A fusion field is ``None`` ("what the level says"), ``True`` or ``False``; an explicit value always wins over the
    level. Levels (an int, or "O0" to "O3"):

    * O0  nothing
    * O1  what does not change the structure of the computation, and takes no memory but the arena
    * O2  what is measured to pay (default)
    * O3  also what needs the full graph

    sp_min_token_num                   rows of a call from which sequence parallelism is used (0: any number; None: as
                                       measured by ``tpfuse tune --sequence-parallel``, else 512 on GPUs and any number on
                                       CPU ranks); calls with fewer have a compiled variant of their own
    fi_allreduce_fusion_max_size_mb    largest message for FlashInfer's all-reduce kernels, MiB (None: any)
    rope_kvcache_fusion_max_token_num  most rows for which RoPE + KV write is fused
    workspace_mb                       symmetric memory per process group on each rank, MiB; a group's first model decides
    peer_timeout_s                     how long a kernel waits for another rank, s (None: the process group's time-out)
    allreduce_rms_kernel               the kernel for every all-reduce + RMSNorm (None: the fastest measured for each size)
    batch_invariant                    a token's bits do not depend on the batch that it is in, as far as operations of
                                       tpfuse make them: one kernel for all row counts (docs/batch_invariance.md)
    token_count_from                   name of the forward argument whose leading dimensions count the tokens of a
                                       call: all dimensions of an integer tensor, all but the last of a floating one
                                       (None: ``input_ids``, ``inputs_embeds``, else the first tensor argument)
    token_boundaries                   ascending row counts at which another compiled variant takes over: (256,) keeps
                                       one for fewer than 256 rows and one for 256 and more

    Raises ConfigError (a ValueError): unknown field or bad value; the message names the nearest valid one.
    """

    optimization_level: int | str = 2
    fuse_allreduce_rms: bool | None = None
    enable_sp: bool | None = None
    fuse_gemm_comms: bool | None = None
    fuse_norm_quant: bool | None = None
    fuse_act_quant: bool | None = None
    fuse_attn_quant: bool | None = None
    fuse_rope_kvcache: bool | None = None
    enable_qk_norm_rope_fusion: bool | None = None
    fuse_act_padding: bool | None = None
    fuse_mla_dual_rms_norm: bool | None = None
    sp_min_token_num: int | None = None
    fi_allreduce_fusion_max_size_mb: float | None = None
    rope_kvcache_fusion_max_token_num: int = 256
    workspace_mb: float = 64
    peer_timeout_s: float | None = None
    allreduce_rms_kernel: str | None = None
    batch_invariant: bool = False
    token_count_from: str | None = None
    token_boundaries: tuple[int, ...] = ()

    def __new__(cls, /, *args: Any, **fields: Any) -> FusionConfig:
        if args:
            raise ConfigError("FusionConfig takes keyword arguments only, for example FusionConfig(optimization_level=1)")
        _reject_unknown(fields)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        set_ = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731  (frozen: normalise once, here)
        set_("optimization_level", _level(self.optimization_level))
        for name in FUSION_LEVELS:
            if getattr(self, name) is not None and not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "True, False or None", _nearest_switch(getattr(self, name)))
        for name in TUNED_FUSION:
            _check_number(name, getattr(self, name), default=_default(name), fraction=name.endswith(("_mb", "_s")))
        if self.peer_timeout_s == 0:
            raise _bad("peer_timeout_s", self.peer_timeout_s, "a number above 0, or None", None)
        if not isinstance(self.batch_invariant, bool):
            nearest = bool(_nearest_switch(self.batch_invariant))
            raise _bad("batch_invariant", self.batch_invariant, "True or False", nearest)
        for name, what in (("token_count_from", "an argument"), ("allreduce_rms_kernel", "a kernel")):
            given = getattr(self, name)
            if given is not None and not (isinstance(given, str) and given):
                raise _bad(name, given, f"the name of {what}, or None", None)
        set_("token_boundaries", _boundaries(self.token_boundaries))

    # -- where a configuration comes from ---------------------------------------------------------------------------

    @classmethod
    def load(cls, source: FusionConfig | Mapping[str, Any] | str | os.PathLike | Iterable[str] | None) -> FusionConfig:
        """From whatever a user has: None, a FusionConfig, a dict, the path of a JSON file, or "key=value" strings.

        Raises ConfigError: unknown field, bad value, unreadable or malformed file, another type.
        """
        if source is None:
            return cls()
        if isinstance(source, cls):
            return source
        if isinstance(source, Mapping):
            return cls.from_dict(source)
        if isinstance(source, str) and _SETTING.match(source) and not os.path.exists(source):
            return cls.from_strings(_SEPARATOR.split(source))
        if isinstance(source, (str, os.PathLike)):
            return cls.from_json(source)
        if isinstance(source, Iterable) and not isinstance(source, (bytes, bytearray)):
            return cls.from_strings(source)
        raise ConfigError(
            "config must be a FusionConfig, a dict, the path of a JSON file or key=value strings, "
            f"got {type(source).__name__}"
        )

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> FusionConfig:
        """From field names and values; lists are taken for tuples, as JSON writes them."""
        values: dict[str, Any] = {str(k): tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        return cls(**values)

    @classmethod
    def from_json(cls, path: str | os.PathLike) -> FusionConfig:
        """From a JSON file that holds one object."""
        try:
            with open(path, encoding="utf-8") as file:
                fields = json.load(file)
        except OSError as error:
            raise ConfigError(f"cannot read the configuration file {os.fspath(path)!r}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:  # malformed JSON, not UTF-8, or nested without end
            raise ConfigError(f"the configuration file {os.fspath(path)!r} is not valid JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"the configuration file {os.fspath(path)!r} must hold one JSON object")
        return cls.from_dict(fields)

    @classmethod
    def from_strings(cls, items: Iterable[str]) -> FusionConfig:
        """From "key=value" strings, as a command line gives them: "fuse_allreduce_rms=off", "token_boundaries=64,256"."""
        fields = {}
        for item in items:
            name, separator, text = str(item).partition("=")
            if not separator:
                raise ConfigError(f"{item!r} is not of the form key=value")
            fields[name.strip()] = text.strip()
        _reject_unknown(fields)
        return cls(**{name: _parse(name, text) for name, text in fields.items()})

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON can write them; ``FusionConfig.from_dict`` reads them back."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    # -- what it comes to --------------------------------------------------------------------------------------------

    def resolve(self, unavailable: Mapping[str, str], by_name_only: Mapping[str, str] | None = None) -> dict[str, Resolved]:
        """Per fusion: on or off, and why.

        unavailable   fusion -> why this version, machine or model cannot do it; a fusion that is not in it can be done
        by_name_only  fusion -> why no level turns it on
        Raises ConfigError: a fusion, or a tuning field of one, was asked for by name and is unavailable.
        """
        resolved = {}
        for name, level in FUSION_LEVELS.items():
            wanted, missing = getattr(self, name), unavailable.get(name, "")
            if wanted and missing:
                raise ConfigError(f"{name}=True cannot be honoured: {missing}")
            if wanted is False:
                resolved[name] = Resolved(False, True, f"{name}=False")
            elif missing:
                resolved[name] = Resolved(False, False, missing)
            elif wanted is None and name in (by_name_only or {}):
                resolved[name] = Resolved(False, False, (by_name_only or {})[name])
            elif wanted is None and int(self.optimization_level) < level:
                resolved[name] = Resolved(False, False, f"optimization_level={self.optimization_level}")
            else:
                resolved[name] = Resolved(True, bool(wanted))
        for name, fusion in TUNED_FUSION.items():
            missing = unavailable.get(name) or unavailable.get(fusion, "")
            if getattr(self, name) != _default(name) and missing:
                raise ConfigError(f"{name}={getattr(self, name)} cannot be honoured: {missing}")
        return resolved

    def asked_of_kernels(self) -> list[str]:
        """ "field=value" of what was set and means nothing without kernels over symmetric memory."""
        asked = {name: getattr(self, name) for name in ("workspace_mb", "allreduce_rms_kernel", "batch_invariant")}
        return [f"{name}={value}" for name, value in asked.items() if value not in (_default(name), "nccl")]

    def row_boundaries(self, resolved: Mapping[str, Resolved]) -> tuple[int, ...]:
        """Row counts at which another compiled variant takes over: those asked for, and where sharding of rows begins."""
        found = {*self.token_boundaries}
        if self.sp_min_token_num and resolved["enable_sp"].on:
            found.add(self.sp_min_token_num)
        return tuple(sorted(found - {1}))


def is_disabled() -> bool:
    """Whether the environment turns tpfuse off. Raises ConfigError: it has another value than on or off."""
    return _switched_on(DISABLE_VARIABLE)


def is_debugging() -> bool:
    """Whether the environment asks for ranks to compare every call of an operation first (slow). Raises
    ConfigError as above."""
    return _switched_on(DEBUG_VARIABLE)


def is_annotating() -> bool:
    """Whether the environment asks for a range around each call of an operation, named by where it stands in the model.
    Raises ConfigError as above."""
    return _switched_on(NVTX_VARIABLE)


def _switched_on(variable: str) -> bool:
    word = os.environ.get(variable, "").strip().lower()
    if word and word not in _TRUE + _FALSE:
        raise ConfigError(f"{variable} must be one of {', '.join(_TRUE + _FALSE)} or not be set, got {word!r}")
    return word in _TRUE


def _reject_unknown(fields: Iterable[str]) -> None:
    known = [field.name for field in dataclasses.fields(FusionConfig)]
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"unknown field {name!r}; the nearest valid one is {near!r}")


def _default(name: str) -> Any:
    return next(field.default for field in dataclasses.fields(FusionConfig) if field.name == name)


def _bad(name: str, value: Any, what: str, nearest: Any) -> ConfigError:
    return ConfigError(f"{name} must be {what}, got {value!r}; the nearest valid one is {nearest!r}")


def _nearest_switch(value: Any) -> bool | None:
    word = str(value).strip().lower()
    if isinstance(value, (int, float)):
        return bool(value)
    found = difflib.get_close_matches(word, _TRUE + _FALSE + _NONE, n=1, cutoff=0.0)[0]
    return None if found in _NONE else found in _TRUE


def _check_number(name: str, value: Any, default: Any, fraction: bool) -> None:
    """A whole number (or, for sizes, any number) of at least zero; None where that is the default."""
    if value is None and default is None:
        return
    kinds = (int, float) if fraction else (int,)
    if isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value < math.inf:
        return
    try:
        number = float(value)
        nearest = max(0, number if fraction and math.isfinite(number) else round(number))
    except (TypeError, ValueError, OverflowError):
        nearest = default
    raise _bad(name, value, "a number of at least 0" if fraction else "a whole number of at least 0", nearest)


def _level(value: Any) -> int:
    number = value
    if isinstance(value, str):
        digits = value.strip().upper().removeprefix("O")
        number = int(digits) if re.fullmatch(r"-?[0-9]+", digits) else None
    if isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= 3:
        return number
    try:
        nearest = min(max(round(float(number)), 0), 3)
    except (TypeError, ValueError, OverflowError):
        nearest = 2
    raise _bad("optimization_level", value, "0 to 3 (or 'O0' to 'O3')", nearest)


def _boundaries(value: Any) -> tuple[int, ...]:
    numbers = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    good = tuple(sorted({n for n in numbers if isinstance(n, int) and not isinstance(n, bool) and n >= 1}))
    if not isinstance(value, (tuple, list)) or good != numbers:
        raise _bad("token_boundaries", value, "ascending positive whole numbers", good)
    return numbers


def _parse(name: str, text: str) -> Any:
    """The value of one "key=value" string; what does not convert stays a text, for the field's own check to refuse."""
    word = text.lower()
    if (name in FUSION_LEVELS or name == "batch_invariant") and word in _TRUE + _FALSE:
        return word in _TRUE
    if word in _NONE:
        return () if name == "token_boundaries" else None
    if name == "token_boundaries":
        return tuple(_number(part) for part in text.split(",") if part)
    return _number(text) if name in TUNED_FUSION else text


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
