"""Lab 15's exercise: the solution passes, and every known mistake gets its hint."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from tplab.exercises.recomputation import check_recomputed


def forget(piece, x):
    state = torch.get_rng_state()
    with torch.no_grad():
        return piece(x), (x, state)


def again(piece, kept, dy):
    x, state = kept
    x = x.detach().requires_grad_()
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        y = piece(x)
    y.backward(dy)
    return x.grad


def forget_plainly(piece, x):
    """The lab's bug, with the next one."""
    with torch.no_grad():
        return piece(x), x


def again_plainly(piece, x, dy):
    x = x.detach().requires_grad_()
    piece(x).backward(dy)
    return x.grad


def again_rewound(piece, kept, dy):
    x, state = kept
    torch.set_rng_state(state)
    return again_plainly(piece, x, dy)


def again_without_weights(piece, x, dy):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(piece(x), x, dy)[0]


def again_twice(piece, x, dy):
    again_plainly(piece, x, dy)
    return again_plainly(piece, x, dy)


def forget_put_back(piece, x):
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        state = torch.get_rng_state()
        return piece(x), (x, state)


def forget_seeded(piece, x):
    torch.manual_seed(0)
    return forget_plainly(piece, x)


def again_seeded(piece, x, dy):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return again_plainly(piece, x, dy)


def again_instead(piece, x, dy):
    x = x.detach().requires_grad_()
    y, weights = piece(x), list(piece.parameters())
    dx, *grads = torch.autograd.grad(y, [x, *weights], dy)
    for weight, grad in zip(weights, grads):
        weight.grad = grad
    return dx


HIDDEN = []


def forget_hiding(piece, x):
    state = torch.get_rng_state()
    HIDDEN.append(piece(x))
    torch.set_rng_state(state)
    return forget(piece, x)


def forget_by_torch(piece, x):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(piece, x, use_reentrant=False), x


def forget_in_place(piece, x):
    y, kept = forget_plainly(piece, x)
    x.mul_(2)
    return y, kept


def forget_with_seed(piece, x):
    """A seed is drawn for each piece; both passes draw from a fork that begins with it."""
    seed = int(torch.randint(1 << 31, ()))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        return piece(x), (x, seed)


def again_with_seed(piece, kept, dy):
    x, seed = kept
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return again_plainly(piece, x, dy)


def forget_a_leaf(piece, x):
    state, x = torch.get_rng_state(), x.detach().requires_grad_()
    with torch.no_grad():
        return piece(x), {"x": x, "state": state}


def again_from_a_leaf(piece, kept, dy):
    now = torch.get_rng_state()
    torch.set_rng_state(kept["state"])
    y = piece(kept["x"])
    torch.set_rng_state(now)
    dx, *grads = torch.autograd.grad(y, [kept["x"], *piece.parameters()], dy)
    for weight, grad in zip(piece.parameters(), grads):
        weight.grad = grad if weight.grad is None else weight.grad + grad
    return dx


@pytest.mark.parametrize("mine", [(forget_with_seed, again_with_seed), (forget_a_leaf, again_from_a_leaf)])
def test_other_peoples_solutions_are_right_too(mine: Any):
    verdict = check_recomputed(*mine)
    assert verdict.passed, verdict


STATES: list[Any] = []


def forget_on_a_stack(piece, x):
    STATES.append(torch.get_rng_state())
    return forget_plainly(piece, x)


def again_from_the_stack(piece, x, dy):
    return again(piece, (x, STATES.pop()), dy)


STATE_OF: dict[int, Any] = {}


def forget_by_piece(piece, x):
    STATE_OF[id(piece)] = torch.get_rng_state()
    return forget_plainly(piece, x)


def again_by_piece(piece, x, dy):
    return again(piece, (x, STATE_OF[id(piece)]), dy)


def forget_in_eval(piece, x):
    piece.eval()
    return forget_plainly(piece, x)


def forget_in_eval_for_now(piece, x):
    y, kept = forget_in_eval(piece, x)
    piece.train()
    return y, kept


def forget_without_gradients(piece, x):
    torch.set_grad_enabled(False)
    return piece(x), x


def again_in_place(piece, kept, dy):
    dx = again(piece, kept, dy)
    dy.zero_()
    return dx


def forget_but_masks(piece, x):
    """Which numbers every layer drops is kept, in a tensor as large as the input each."""
    masks = []
    hooks = [layer[-1].register_forward_hook(lambda layer, x, y: masks.append(y != 0)) for layer in piece]
    y, kept = forget_plainly(piece, x)
    for hook in hooks:
        hook.remove()
    return y, (kept, masks)


KEPT: list[Any] = []


def forget_in_a_list(piece, x):
    y, kept = forget(piece, x)
    KEPT.append(kept)
    return y, len(KEPT) - 1


def forget_nothing(piece, x):
    y = piece(x.detach().requires_grad_())
    return y, y


def forget_little(piece, x):
    kept = [x]
    with torch.no_grad():
        for layer in piece:
            kept.append(layer(kept[-1]))
    return kept[-1], kept


def test_the_solution():
    state = torch.get_rng_state()
    verdict = check_recomputed(forget, again)
    assert verdict.passed, verdict
    assert [panel.title for panel in verdict.panels] == ["yours, dx", "right"]
    assert torch.equal(state, torch.get_rng_state())  # the check itself draws nothing


@pytest.mark.parametrize(
    "mine, said",
    [
        (
            (forget_plainly, again_plainly),
            "It is right without dropout. The second pass does not drop the same numbers",
        ),
        ((forget, again_rewound), "it leaves the random generator in another state than it found it"),
        ((forget_seeded, again_seeded), "every batch and every layer must drop different numbers"),
        ((forget_put_back, again), "Does your code seed the generator, or put it back after the forward pass?"),
        ((forget_plainly, again_instead), "It is that of the second batch alone. As in torch, a backward pass adds"),
        ((forget_hiding, again), "Something keeps activations"),
        ((forget_by_torch, again_plainly), "`checkpoint` does the work"),
        ((forget_in_place, again_plainly), "my_forget: it changes x in place"),
        ((forget_plainly, again_without_weights), "gradient of layer 0's weight is not right, without dropout"),
        ((forget_plainly, again_without_weights), "It is zero: does the second pass go back to the weights?"),
        ((forget_plainly, again_twice), "It is twice what it should be."),
        ((forget, lambda piece, kept, dy: again(piece, kept, dy) * torch.nan), "dx is not right"),
        ((forget, lambda piece, kept, dy: again(piece, kept, dy * torch.nan)), "is not right"),
        ((forget_nothing, again_plainly), "my_forget: what it returns still has its graph"),
        ((forget_but_masks, again_plainly), "my_forget: it keeps 3 tensors as large as its input"),
        (
            (forget_in_a_list, lambda piece, place, dy: again(piece, KEPT[place], dy)),
            "bytes are still in memory when its backward pass has ended",
        ),
        ((forget_little, again_plainly), "my_forget: it keeps 36 numbers, and the input has 12"),
        ((forget_plainly, lambda piece, x, dy: dy.backward if x is None else None), "my_again: it returned None"),
        ((forget_plainly, lambda piece, x, dy: (dy,)), "my_again: it returned a tuple"),
        ((forget, again_in_place), "my_again: it changes dy in place"),
        ((forget_on_a_stack, again_from_the_stack), "dx is right for one microbatch at a time, but not with two in"),
        ((forget_by_piece, again_by_piece), "Is everything that my_again needs in `kept`?"),
        ((forget_in_eval, again_plainly), "my_forget: it leaves layers in eval mode"),
        ((forget_in_eval_for_now, again_plainly), "my_forget: no layer has dropped anything, with dropout"),
        ((forget_without_gradients, again_plainly), "my_forget: it leaves gradients switched off"),
        ((forget_plainly, lambda piece, x, dy: dy[:2]), "dx has shape [2, 4]"),
        ((forget_plainly, lambda piece, x, dy: 1 / 0), "ZeroDivisionError"),
        ((lambda piece, x: (7, x), again_plainly), "it must return y and what to keep, and y is 7"),
    ],
)
def test_known_mistakes(mine: Any, said: str):
    verdict = check_recomputed(*mine)
    assert verdict.passed is False and said in verdict.text, verdict


def test_what_the_lab_says_of_eight_sequences():
    from tests.labs.prose import printed, sentences
    from tplab.cost import H100_MEASURED
    from tplab.forecast.memory import usable_bytes

    lab = "15_recomputation"
    assert "sequences per microbatch: 8. Rank 0: 150.3 GB" in printed(lab)
    assert round(150.3e9 / usable_bytes(H100_MEASURED.chip), 1) == 1.8
    assert "With eight, it needs 1.8 times the memory that there is." in sentences(lab)


def test_an_untouched_stub():
    def my_again(piece, kept, dy): ...

    assert check_recomputed(forget, cast(Any, my_again)).passed is None
