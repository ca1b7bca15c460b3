"""Streams and memory of a device that is not there.

Who waits for whom, and which uses of memory could race.
"""

import gc
import weakref
from collections import Counter
from contextlib import contextmanager

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel import offload


class Stream:
    """A stream as a vector clock: how far it has seen every stream come."""

    def __init__(self, name, device):
        self.name, self._device, self.seen = name, device, Counter({name: 1})

    def record_event(self):
        event = self.name, self.seen.copy()
        self.seen[self.name] += 1
        return event

    def wait_event(self, event):
        source, seen_by_event = event
        self._device.log.append((self.name, f"waits for {source}"))
        if (self.name, source) != self._device.dropped:
            self.seen |= seen_by_event  # the larger of each


class Device(TorchDispatchMode):
    """A device module's streams, of which each operator runs on the current one at once.

    It notes what could race.

    Two uses of memory, one of which writes, must be ordered by events. What is freed the
    computation may write again. It has nothing that the host could wait for.
    """

    def __init__(self, dropped=None):
        super().__init__()
        self.dropped, self.log, self.races = dropped, list[tuple[str, str]](), set[str]()
        self._uses: dict[int, dict[tuple[str, bool], int]] = {}
        self._names = iter(("out", "back"))
        self.compute = self._current = Stream("compute", self)

    def Stream(self, device):
        return Stream(next(self._names), self)

    def current_stream(self, device):
        return self._current

    @contextmanager
    def stream(self, stream):
        before, self._current = self._current, stream
        yield
        self._current = before

    def _use(self, place, stream, writes, what):
        uses = self._uses[place]
        for (name, wrote), when in uses.items():
            if (writes or wrote) and stream.seen[name] < when:
                self.races.add(f"{stream.name} {what} what {name} {'writes' if wrote else 'reads'}")
        uses[stream.name, writes] = stream.seen[stream.name]

    def _free(self, place):
        self._use(place, self.compute, True, "frees")
        del self._uses[place]

    def _place(self, x):
        storage = x.untyped_storage()
        if storage._cdata not in self._uses:
            self._uses[storage._cdata] = {}
            weakref.finalize(storage, self._free, storage._cdata).atexit = False
        return storage._cdata

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, stream = kwargs or {}, self._current
        out = func(*args, **kwargs)
        self.log.append((stream.name, func.name()))
        if stream is not self.compute and func.name() == "aten::copy_":
            assert args[2], "a copy for which the host waits"
        arguments = [
            (a, args[i] if i < len(args) else kwargs.get(a.name))
            for i, a in enumerate(func._schema.arguments)
        ]
        read, written = set[int](), set[int]()
        for argument, value in arguments:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            (written if writes else read).update(
                self._place(x) for x in tree_leaves(value) if isinstance(x, Tensor)
            )
        fresh = {self._place(x) for x in tree_leaves(out) if isinstance(x, Tensor)} - read - written
        for place in () if func.is_view else read:
            self._use(place, stream, False, "reads")
        for place in written | fresh:
            self._use(place, stream, True, "writes")
        return out


@contextmanager
def streams(monkeypatch, dropped=None):
    """Let copies run on a device's streams, one wait of which may be left out."""
    device = Device(dropped)
    with monkeypatch.context() as patch, device:
        patch.setattr(offload, "get_device_module", lambda _: device)
        yield device
        gc.collect()
