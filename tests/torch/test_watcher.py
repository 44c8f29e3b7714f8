"""The one dispatch mode: who listens is told of what a thread does, and nothing is in force while nobody does."""

import threading

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tplab import Mesh
from tplab.torch import LiveBytes, all_reduce, ring_shift, run
from tplab.torch.private import dispatch_modes, num_modes
from tplab.torch.ranks.watcher import Listener, Watcher, listening, watcher


class Names(Listener):
    """The names of operations as they begin and end, and those of collectives."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def __enter__(self) -> "Names":
        watcher().add(self)
        return self

    def __exit__(self, *error: object) -> None:
        watcher().remove(self)

    def starts(self, func, args, kwargs):
        return func.overloadpacket.__name__

    def ended(self, func, args, kwargs, result, note):
        self.heard.append(note)

    def begins(self):
        return "begun"

    def met(self, call, x, y, note):
        self.heard.append(f"{call.op} {note}")


class Programs(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Inner(Programs): ...


def test_nothing_is_in_force_while_nobody_listens():
    assert not num_modes()
    with Names() as one:
        with LiveBytes(), Names() as two:
            _ = torch.ones(2) + 1
            assert [type(mode) for mode in dispatch_modes()] == [Watcher]
        _ = torch.ones(2) * 2
    assert not num_modes()
    assert (one.heard, two.heard) == (["ones", "add", "ones", "mul"], ["ones", "add"])


def test_it_is_below_the_programs_modes_which_leave_in_any_order():
    names = Names()
    with Programs(), Inner():
        with names:
            torch.ones(2)
            kinds = [type(mode) for mode in dispatch_modes()]
        torch.ones(3)
        left = [type(mode) for mode in dispatch_modes()]
    assert kinds == [Watcher, Programs, Inner] and left == kinds[1:] and names.heard == ["ones"]
    programs = Programs()
    with names:
        programs.__enter__()
    torch.ones(2)
    assert [type(mode) for mode in dispatch_modes()] == [Programs]
    programs.__exit__(None, None, None)
    assert names.heard == ["ones"]


@pytest.mark.parametrize("kind", [Names, LiveBytes])
def test_compound_operations_are_told_as_their_parts_in_inference_mode_too(kind: type[Listener]):
    x, w = torch.ones(4, 8), torch.ones(3, 8)
    with Names() as plain, torch.no_grad():
        F.linear(x, w, torch.ones(3))
    with torch.inference_mode(), kind(), Names() as names:  # type: ignore[attr-defined]
        F.linear(x, w, torch.ones(3))
    assert names.heard == plain.heard == ["ones", "t", "addmm"]


def test_tensors_without_data_are_not_told():
    fake = FakeTensorMode()
    x = fake.from_tensor(torch.ones(3))
    with Names() as names:
        torch.ones(2)
        _ = x + x
    assert names.heard == ["ones"]


def test_one_that_leaves_inside_a_backward_pass_hears_no_more_and_the_mode_leaves_later():
    names, x = Names(), torch.ones(3, requires_grad=True)
    y = (x * 2).exp()
    names.__enter__()
    y.register_hook(lambda _: names.__exit__())
    y.sum().backward()
    heard = [*names.heard]
    assert "expand" in heard and "mul" not in heard
    assert watcher().listeners == ()
    with Names() as again:
        torch.ones(2)
    assert again.heard == ["ones"] and names.heard == heard and not num_modes()


def test_one_that_comes_or_leaves_inside_an_operation_does_so_with_the_next():
    guest = Names()

    class Host(Names):
        def starts(self, func, args, kwargs):
            if not self.heard:
                guest.__enter__()
            return super().starts(func, args, kwargs)

        def ended(self, func, args, kwargs, result, note):
            super().ended(func, args, kwargs, result, note)
            if len(self.heard) == 2:
                self.__exit__()

    host = Host()
    host.__enter__()
    _ = (torch.ones(2) + 1) * 2
    assert (host.heard, guest.heard) == (["ones", "add"], ["add", "mul"])
    assert dispatch_modes() == [watcher()]
    guest.__exit__()
    assert not num_modes()


def test_each_thread_has_its_own():
    seen = []
    with Names() as names:
        thread = threading.Thread(target=lambda: seen.append((num_modes(), listening(Names), torch.ones(2))))
        thread.start()
        thread.join()
    assert seen[0][:2] == (0, None) and names.heard == []


def test_collectives_are_told_with_what_was_noted_as_they_began():
    def program(x: Tensor) -> tuple[list[str], int]:
        with Names() as names:
            y = all_reduce(x, "tp")
            ring_shift(y * 2, "tp")
        return names.heard, num_modes()

    heard = run(program, Mesh(tp=2), torch.ones(2)).per_rank
    assert heard[0][0] == ["all_reduce None", "mul", "ring_shift None"]
    assert heard[0] == heard[1]
