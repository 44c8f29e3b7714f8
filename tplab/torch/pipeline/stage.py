"""A stage of a pipeline, and what it keeps of one microbatch between its forward and its backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

from torch import Tensor, nn

from tplab.errors import ScheduleError
from tplab.pipeline.checks import check_group, outputs_of
from tplab.torch.pipeline.graph import Gradients, Graph, Tensors, add_gradients, bytes_of
from tplab.torch.pipeline.redraw import Mark, Redraw
from tplab.torch.watching.memory import hold

Function = Callable[..., Tensors]


class Section(NamedTuple):
    """Layers that run together: all of a stage, or those between two checkpoints.

    wants_grads   whether anything before it needs the gradients of its inputs
    """

    function: Function
    module: nn.Module
    parameters: list[nn.Parameter]
    wants_grads: bool

    def run(self, inputs: Tensors) -> tuple[Graph, Tensors]:
        """The graph of its forward pass, and the outputs."""
        return Graph.of(self.function, self.parameters, self.wants_grads, inputs)


class Stage:
    """Consecutive layers of a model, run on one microbatch at a time.

    module             is called with one or several tensors, and returns one or a tuple of them
    number, num_stages the stage's number, and how many there are
    checkpoint_every   only the input of each group of this many layers (of an nn.Sequential) is kept; the activations
                       in between are recomputed in the backward pass. Groups begin at the stage's first layer
    """

    def __init__(self, module: nn.Module, number: int, num_stages: int, checkpoint_every: int | None = None):
        self.module, self.number = module, number
        self.is_first, self.is_last = number == 0, number == num_stages - 1
        self.recomputes = checkpoint_every is not None
        groups = [module] if checkpoint_every is None else self._groups(checkpoint_every)
        self.sections: list[Section] = []
        wants_grads = not self.is_first
        for group in groups:
            parameters = [p for p in group.parameters() if p.requires_grad]
            self.sections.append(Section(self._called(group), group, parameters, wants_grads))
            wants_grads = wants_grads or bool(parameters)

    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters."""
        return [p for p in self.module.parameters() if p.requires_grad]

    def in_one_section(self) -> set[nn.Parameter]:
        """The trainable parameters whose gradients come in one piece."""
        counts = Counter(p for section in self.sections for p in section.parameters)
        return {p for p, count in counts.items() if count == 1}

    def _groups(self, size: int) -> list[nn.Module]:
        check_group(size)
        if not isinstance(self.module, nn.Sequential):
            raise ScheduleError(
                f"checkpoint_every={size} needs the layers of stage {self.number}, which is a "
                f"{type(self.module).__name__}; make it an nn.Sequential of them"
            )
        layers = list(self.module)
        return [InTurn(layers[at : at + size]) for at in range(0, len(layers), size)] or [self.module]

    def _called(self, module: nn.Module) -> Function:
        return lambda *inputs: outputs_of(self.number, module(*inputs), Tensor)


class InTurn(nn.Sequential):
    """Layers that run one after the other; several tensors may pass between them, as a tuple."""

    def __init__(self, layers: Sequence[nn.Module]):
        super().__init__(*layers)

    def forward(self, *inputs: Tensor) -> Tensor | Tensors:
        x: Tensor | Tensors = inputs[0] if len(inputs) == 1 else inputs
        for layer in self:
            x = layer(*x) if isinstance(x, tuple) else layer(x)
        return x


class Pass:
    """One microbatch in one stage: from its forward pass until its backward pass is done.

    inputs    the inputs of the stage
    finish    for the last stage: outputs -> loss, which the pass returns instead
    redraw    repeats random numbers when activations are recomputed
    target    the tensors that `finish` compares with: they are in memory anyway, like the first stage's inputs
    """

    def __init__(
        self,
        stage: Stage,
        inputs: Tensors,
        finish: Callable[..., Tensors] | None,
        redraw: Redraw,
        target: Sequence[Tensor] = (),
    ):
        self._stage, self._redraw = stage, redraw
        self._given = [*(inputs if stage.is_first else ()), *target]
        self._sections = list(stage.sections)
        if finish is not None:
            last = self._sections[-1]
            self._sections[-1] = last._replace(function=lambda *xs: finish(*last.function(*xs)))
        self._graphs: list[Graph] = []
        self._entered: list[Tensors] = []  # the inputs of each section, if activations are recomputed
        self._tokens: list[list[object]] = []  # mark those inputs as saved
        self._marks: list[Mark] = []
        with redraw:
            self.outputs = self._recomputable(inputs) if stage.recomputes else self._kept(inputs)

    def _kept(self, inputs: Tensors) -> Tensors:
        graph, outputs = self._sections[0].run(inputs)
        self._graphs = [graph]
        return outputs

    def _recomputable(self, inputs: Tensors) -> Tensors:
        for section in self._sections:
            self._entered.append(inputs)
            self._tokens.append([hold(x) for x in inputs])
            self._marks.append(self._redraw.mark())
            inputs = section.run(inputs)[1]  # with a graph, which is dropped: layers may ask for the grad mode
        return inputs

    def _backwards(self) -> Iterator[Graph]:
        """The graphs from last to first; if activations are recomputed, each one when its turn comes."""
        yield from reversed(self._graphs)
        while self._entered:
            section, inputs = self._sections[len(self._entered) - 1], self._entered.pop()
            self._redraw.go_back(self._marks.pop())
            with self._redraw, _buffers_aside(section.module):
                graph, _ = section.run(inputs)
            self._tokens.pop()
            yield graph

    def backward(self, grads: Tensors) -> tuple[Tensors, Gradients]:
        """B: from the gradients of floating-point outputs, compute those of floating-point inputs and of parameters."""
        gradients: Gradients = {}
        for graph in self._backwards():
            grads, found = graph.backward(grads)
            add_gradients(gradients, found)
        self._let_go()
        return grads, gradients

    def input_grads(self, grads: Tensors) -> Tensors:
        """I: compute those of the floating-point inputs. What W does not need is freed."""
        graphs = []
        for graph in self._backwards():
            grads = graph.input_grads(grads)
            graphs.insert(0, graph)
        self._graphs = graphs
        return grads

    def weight_grads(self) -> Gradients:
        """W: compute those of the parameters. The rest is freed."""
        gradients: Gradients = {}
        for graph in self._graphs:
            add_gradients(gradients, graph.weight_grads())
        self._let_go()
        return gradients

    def _let_go(self) -> None:
        self._graphs, self._given = [], []

    def num_bytes(self) -> int:
        """The bytes kept for the backward pass, each piece of memory once, without the microbatch itself and the
        parameters, which are in memory anyway."""
        kept = chain(*self._entered, *(graph.tensors() for graph in self._graphs))
        return bytes_of(kept, [*self._given, *self._stage.module.parameters(), *self._stage.module.buffers()])


@contextmanager
def _buffers_aside(module: nn.Module) -> Iterator[None]:
    """A context in which the module writes to copies of its buffers, so that recomputation has no effect on them."""
    found = [(part, name, x) for part in module.modules() for name, x in part.named_buffers(recurse=False)]
    for part, name, x in found:
        setattr(part, name, x.clone())
    try:
        yield
    finally:
        for part, name, x in found:
            setattr(part, name, x)
