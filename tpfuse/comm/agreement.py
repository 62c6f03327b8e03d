"""Ranks agree before they act.

A decision that differs between ranks ends in mismatched collectives: a hang, or wrong numbers. What a rank is about to do
is therefore written down as a text, exchanged within the process group, and compared. The exchange goes through the
group's key-value store, not through a collective: it cannot pair up with a collective that another rank is in.
"""

from __future__ import annotations

import contextlib
import json
import weakref

import torch.distributed as dist

from tpfuse.comm import groups
from tpfuse.errors import AgreementError, GroupError, TpfuseError

_SUBJECT = "_subject"
DESTROYED = "the model has a process group that was destroyed: give its layers the new one"
_rounds: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def agree(
    group: dist.ProcessGroup,
    subject: str,
    proposal: dict[str, str],
    failure: TpfuseError | None = None,
    may_differ: str = "",
) -> bool:
    """Return once every rank of the group has made the same proposal; otherwise raise on every one of them.

    subject   what the proposal is about, for the message
    proposal  names and values to compare; ignored if there is a failure
    failure   an error this rank has already met: it is raised here, after the others have been told
    may_differ  a text that ranks may differ in; returns whether they do not

    Collective: every rank of the group calls it, as often as the others. It waits at most the group's time-out.
    Raises the failure on the rank that had one, AgreementError on the others and on all if proposals differ.
    """
    if not groups.exists(group):
        raise failure or GroupError(DESTROYED)
    if groups.has_peers(group):
        told = f"{type(failure).__name__}: {failure}" if failure else ""
        everybody = exchange(group, subject, {"failure": told, "may_differ": may_differ, **proposal})
        if failure is None:
            _compare(group, subject, proposal, everybody)
            return len({each["may_differ"] for each in everybody}) == 1
    if failure is not None:
        raise failure
    return True


def exchange(group: dist.ProcessGroup, subject: str, mine: dict[str, str]) -> list[dict[str, str]]:
    """What every rank of the group says, in rank order. Collective, like ``agree``; raises AgreementError: one is
    missing."""
    turn = _rounds.get(group, 0)
    _rounds[group] = turn + 1
    store, timeout = groups.store_of(group), groups.timeout(group)
    prefix = f"tpfuse/agree/{group.group_name}/{turn}"
    keys = [f"{prefix}/{rank}" for rank in range(group.size())]
    try:
        store.set(keys[group.rank()], json.dumps({**mine, _SUBJECT: subject}))
        store.wait(keys, timeout)
        everybody = [json.loads(store.get(key)) for key in keys]
    except RuntimeError as error:
        try:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        except RuntimeError:
            raise AgreementError(f"{subject}: the process that kept the store of the group has ended") from error
        name, seconds = f"group {group.group_name!r}", f"{timeout.total_seconds():g} s"
        raise AgreementError(
            f"rank(s) {missing} of {name} did not reach {subject} within the time-out of {seconds}: they have died, hang, "
            "or do something else"
        ) from error
    with contextlib.suppress(RuntimeError):  # the rank that keeps the store may have all it needs, and end
        if (
            store.add(f"{prefix}/read", 1) == group.size()
        ):  # the last reader: a later group of that name must not find these
            for key in (*keys, f"{prefix}/read"):
                store.delete_key(key)
    subjects = [each.pop(_SUBJECT) for each in everybody]
    if len(set(subjects)) > 1:
        told = ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(subjects))
        raise AgreementError(f"ranks of group {group.group_name!r} are in different calls: {told}")
    return everybody


def told(everybody: list[dict[str, str]], fact: str = "reason") -> str:
    """What the ranks that gave an answer under ``fact`` gave, as one text, the same on all of them; "" if none did."""
    return "; ".join(f"rank {rank}: {each[fact]}" for rank, each in enumerate(everybody) if each[fact])


def _compare(group: dist.ProcessGroup, subject: str, mine: dict[str, str], all_: list[dict[str, str]]) -> None:
    failed = {rank: p["failure"] for rank, p in enumerate(all_) if p["failure"]}
    if failed:
        told = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
        raise AgreementError(f"{subject}: failed on other ranks of group {group.group_name!r}: {told}")
    for name in mine:
        values = [p.get(name, "") for p in all_]
        if len(set(values)) > 1:
            told = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise AgreementError(f"{subject}: ranks of group {group.group_name!r} differ in {name}: {told}")
