"""Intercept matrix products with parameters, and a mixture's routing of tokens to experts. Both are caught at the torch
functions that compute them, as many models never call the Linear whose weight they use, or keep the weights of all
experts in one parameter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from featcal_cli.models.module_kinds import ParameterSlice

DECISIONS = {torch.topk, Tensor.topk, torch.argmax, Tensor.argmax}
LARGEST = {torch.max, Tensor.max}
"""Functions that choose experts like DECISIONS if they return one choice for each row of scores [n, experts]."""
ADDITIONS = {torch.add, Tensor.add, Tensor.__add__}
GATHERS, SPLITS = {Tensor.__getitem__}, {torch.split, Tensor.split}
SCALINGS = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}
ROUTING_FUNCTIONS = {*DECISIONS, *LARGEST, *GATHERS, *SPLITS, *SCALINGS}
"""Functions with which mixtures choose experts, gather each expert's tokens, and weigh the experts' outputs."""


class Route:
    """A record of the tokens that the rows [n, d] of an expert's input were taken from."""

    def __init__(self, rows: Tensor, shape: torch.Size, whole: tuple[Route, int] | None = None) -> None:
        self.rows = rows
        """Index [n] of each row's token among all tokens."""
        self.shape = shape
        """Shape [.., d] of the features of all tokens, which the rows were taken from."""
        self.gate: Tensor | None = None
        """Gate of each row [n]: the factor by which the mixture multiplies the expert's output."""
        self.whole = whole
        """The route that this one is a part of, and the row of that route at which this part begins."""

    def gates(self) -> Tensor | None:
        """Return the gate of each row [n], if need be from the route that this one is a part of; None if no gate was
        recorded."""
        if self.gate is None and self.whole is not None and (gates := self.whole[0].gates()) is not None:
            return gates[self.whole[1] : self.whole[1] + len(self.rows)]
        return self.gate


class Routing:
    """Follows a mixture's routing during one run: which experts are chosen, and which tokens each expert is given.

    1. A top-k, argmax or max over scores is a decision. It is recorded, or replaced by the decision that another run
       made at the same point, so that two models route the same tokens to the same experts.
    2. After a decision, indexing features by token numbers yields an expert's input, whose rows are recorded as a
       Route. Splitting these rows yields a partial route for each expert.
    3. Multiplying these rows by a column [n, 1] sets the route's gates.

    Mixtures are recognised by these torch functions alone, never by the names of models.
    """

    def __init__(
        self,
        decided: Sequence[Any] = (),
        on_decision: Callable[[Tensor], None] = lambda _: None,
        *,
        in_turn: bool = False,
    ) -> None:
        """Replay the decisions `decided` of another run, if there are any. `on_decision` is called with the scores that
        each decision is made from. With `in_turn`, tokens choose experts in turn instead of by their scores."""
        self.decisions: list[Any] = []
        self.active_gates = 1
        """Number of running modules that choose experts. While it is 0, a top-k is not taken for a routing decision."""
        self._decided, self._on_decision, self._in_turn = decided, on_decision, in_turn
        self._scores = 0
        """Number of scores for each token in the latest decision."""
        self._routes: list[Route] = []
        self._parts: list[tuple[Tensor, Route]] = []

    def clear(self) -> None:
        """Delete all records."""
        for records in (self.decisions, self._routes, self._parts):
            records.clear()

    def enter(self) -> None:
        """Record that a module that chooses experts starts; it may lie inside another one."""
        self.active_gates += 1

    def leave(self) -> None:
        """Record that a module that chooses experts ends."""
        self.active_gates -= 1

    def find(self, x: Tensor) -> Route | None:
        """Return the route of the rows of x [n, d]; None if no routing was recorded for them, as when they are all
        tokens."""
        if x.ndim != 2:
            return None
        part = next((route for tensor, route in self._parts if tensor is x), None)
        return part or next((route for route in reversed(self._routes) if len(route.rows) == len(x)), None)

    def find_nonzero_tokens(self, x: Tensor) -> list[Tensor] | None:
        """Return the token numbers [n] of each expert if x [experts, T, d] gives all tokens to all experts, with zeros
        for tokens that are not routed to an expert. None if x is no such input."""
        choice = self.decisions[-1] if self.decisions else None
        chosen = choice[1] if isinstance(choice, tuple) else choice
        if not isinstance(chosen, Tensor) or chosen.ndim not in (1, 2):
            return None
        if (len(x), x.shape[1]) != (self._scores, len(chosen)):
            return None
        # without values, a token stands for those of an expert
        if x.is_meta:
            return [chosen.new_zeros(1)] * len(x)
        experts = torch.arange(len(x), device=x.device).view(-1, 1, 1)
        is_given = (chosen.reshape(1, x.shape[1], -1) == experts).any(-1)
        others = (x.any(-1) & ~is_given).sum()
        *counts, others_given = torch.cat([is_given.sum(1), others.view(1)]).tolist()  # one look
        if others_given or sum(counts) == is_given.numel():
            return None
        return list(is_given.nonzero()[:, 1].split(counts))

    def take_tokens(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Select the tokens with these numbers [n] from an expert's input [T, d], and record their route so that `find`
        returns it."""
        tokens = x[numbers]
        self._parts.append((tokens, Route(numbers, x.shape)))
        return tokens

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call one of ROUTING_FUNCTIONS, and record the decision, route or gates that result from it."""
        result = func(*args, **kwargs)
        is_decision = func in DECISIONS or (func in LARGEST and isinstance(result, tuple) and args[0].ndim == 2)
        if is_decision and self.active_gates:
            self._on_decision(args[0])
            self._scores = args[0].shape[-1]
            # replay the other run's decision, so that both give an expert the same tokens
            result = self._decided[len(self.decisions)] if len(self.decisions) < len(self._decided) else result
            result = _choose_in_turn(args[0], result) if self._in_turn else result
            self.decisions.append(result)
        elif not self.decisions:  # before any decision, indexing and scaling are ordinary arithmetic
            return result
        elif func in GATHERS:
            self._gather(args[0], args[1], result)
        elif func in SPLITS and (whole := self.find(args[0])) is not None:
            start = 0
            for part in result:
                self._parts.append((part, Route(whole.rows[start : start + len(part)], whole.shape, (whole, start))))
                start += len(part)
        elif func in SCALINGS and isinstance(args[1], Tensor):
            for x, gate in (args, args[::-1]):
                if gate.ndim == 2 and gate.shape[1] == 1 < x.shape[-1] and (scaled := self.find(x)) is not None:
                    # a shared expert's gate, which comes later, may scale as many rows
                    scaled.gate = gate[:, 0] if scaled.gate is None else scaled.gate
        return result

    def _gather(self, source: Tensor, index: Any, result: Tensor) -> None:
        """Record the route of rows that were taken from the features of all tokens by indexing with token numbers."""
        parts = [part for part in (index if isinstance(index, tuple) else (index,)) if part is not None]
        if source.ndim < 2 or len(parts) != 1 or not isinstance(parts[0], Tensor) or not source.is_floating_point():
            return
        rows = parts[0]
        # a mask over tokens selects the same rows as their numbers do
        if rows.dtype == torch.bool:
            rows = rows.flatten().nonzero()[:, 0] if rows.shape == source.shape[:-1] else rows
        if rows.ndim == 1 and rows.dtype == torch.int64 and result.numel() == len(rows) * source.shape[-1]:
            self._routes.append(Route(rows, source.shape))


def _choose_in_turn(scores: Tensor, decision: Any) -> Any:
    """Replace a routing decision, made from scores [.., experts], by one of the same form that chooses all experts in
    turn: each token's first choice is the expert after the first choice of the token before. A decision that is not
    made along the last dimension is returned as it is."""
    chosen = decision[1] if isinstance(decision, tuple) else decision
    leading, is_one = scores.shape[:-1], chosen.shape == scores.shape[:-1]
    if not scores.ndim or not (is_one or chosen.shape[:-1] == leading):
        return decision
    tokens = torch.arange(leading.numel(), device=scores.device).view(*leading, 1)
    ranks = torch.arange(1 if is_one else chosen.shape[-1], device=scores.device)
    # what is computed from the decision still depends on what the scores depend on
    experts = (tokens + ranks + 0 * chosen.view(*leading, -1)) % scores.shape[-1]
    values, experts = (x.view(chosen.shape) for x in (scores.gather(-1, experts), experts))
    return type(decision)((values, experts)) if isinstance(decision, tuple) else experts


MATRIX_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm}
"""Functions that compute x W, or W x if features come before tokens."""


BATCHED_PRODUCTS = {torch.bmm, Tensor.bmm, torch.baddbmm}
"""Functions that compute x W for a batch of inputs x and as many matrices W, which may all lie in one parameter."""
CONVOLUTION_FUNCTIONS = {functional.conv1d, functional.conv2d, functional.conv3d}


class MatrixProduct(NamedTuple):
    """A matrix product x Wᵀ + b, read from a call of a torch function."""

    x: Tensor
    """The input of the product, with shape [.., d_in]."""
    weight: Tensor
    """The weight [d_out, d_in], a view of the parameter in the same memory."""
    bias: Tensor | None
    """The bias [d_out]; None if the function adds no bias."""
    features_first: bool = False
    """Whether the function takes x as [.., d, T], features before tokens, and returns W x."""


class MatmulInterceptor(TorchFunctionMode):
    """Reports, while it is active, every matrix product whose weight lies in one of the given parameters."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        before: Callable[[ParameterSlice, Tensor, ParameterSlice | None], None],
        after: Callable[[ParameterSlice, Tensor], None] | None = None,
        weights: Collection[ParameterSlice] | None = None,
        routing: Routing | None = None,
        on_bias: Callable[[ParameterSlice, ParameterSlice], None] | None = None,
        convolutions: Mapping[str, nn.Module] | None = None,
    ) -> None:
        """Watch products with these parameters, given by path.

        `before` is called with the weight, the input x [.., d_in], and the bias if it lies in one of the parameters;
        `after` is called with the weight and the product. If `weights` is given, only products with these weights are
        reported. `routing` records a mixture's routing. `on_bias` is called with a weight and a bias that is added to
        its product later. `convolutions` are modules by the paths of their weights; a function call that computes the
        same as one of them is reported too.
        """
        super().__init__()
        self._parameters, self._before, self._after, self._weights = parameters, before, after, weights
        self._routing, self._on_bias, self._convolutions = routing, on_bias, convolutions or {}
        self._latest: tuple[ParameterSlice, Tensor] | None = None
        self._attending = torch.Size([0])
        """Shape of the queries of the latest multi-head attention, except the last dimension."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward:
            self._attending = args[0].shape[:-1]
            with self:
                return _attend(*args, **kwargs)
        if self._routing is not None and func in ROUTING_FUNCTIONS:
            return self._routing.run(func, args, kwargs)
        if self._on_bias is not None and self._latest is not None and func in ADDITIONS and args[0] is self._latest[1]:
            bias = self._find(args[1]) if isinstance(args[1], Tensor) and args[1].ndim == 1 else None
            if bias is not None:
                self._on_bias(self._latest[0], bias)
        if func in BATCHED_PRODUCTS and not kwargs:
            return self._multiply_batch(func, args)
        product = self._read(func, args, kwargs)
        weight = None if product is None else self._find(product.weight)
        if product is None or weight is None or not self._is_watched(weight):
            return func(*args, **kwargs)
        x = product.x
        # attention has made one dimension of two; an expert without tokens has no rows
        if x.ndim == 2 and 0 < len(x) == self._attending.numel():
            x = x.view(*self._attending, -1)
        self._before(weight, x, None if product.bias is None else self._find(product.bias))
        if product.features_first and self._after is not None:  # which is to be told of [.., T, d]
            y = functional.linear(x, product.weight)
            self._after(weight, y)
            return y.mT
        result = func(*args, **kwargs)
        self._latest = (weight, result) if self._on_bias is not None else None
        if self._after is not None:
            self._after(weight, result)
        return result

    def _is_watched(self, weight: ParameterSlice) -> bool:
        return self._weights is None or weight in self._weights

    def _multiply_batch(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call one of BATCHED_PRODUCTS on x [n, T, d_in] and n matrices [d_in, d_out]. Each watched product is
        reported, with only the tokens that are routed to it."""
        *given, x, matrices = args
        if self._find(matrices) is None or (given and given[0].shape[:2] != (len(x), 1)):
            return func(*args)
        weights = [self._find(matrix.T) for matrix in matrices]
        watched = [weight for weight in weights if weight is not None and self._is_watched(weight)]
        if not watched:
            return func(*args)
        rows = (None if self._routing is None or given else self._routing.find_nonzero_tokens(x)) or []
        products = []
        for number, (weight, matrix) in enumerate(zip(weights, matrices, strict=True)):
            bias, tokens = given[0][number, 0] if given else None, x[number]
            if weight in watched:
                if self._routing is not None and rows:
                    tokens = self._routing.take_tokens(tokens, rows[number])
                self._before(weight, tokens, None if bias is None else self._find(bias))
            if self._after is not None:
                y = functional.linear(tokens, matrix.T, bias)
                if weight in watched:
                    self._after(weight, y)
                is_whole = len(y) == x.shape[1]
                products.append(y if is_whole else y.new_zeros(x.shape[1], y.shape[1]).index_copy(0, rows[number], y))
        return torch.stack(products) if products else func(*args)

    def _read(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> MatrixProduct | None:
        """Interpret a call of a torch function as a product x Wᵀ + b; None if it is no such product."""
        if func is functional.linear:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
            return MatrixProduct(given["input"], given["weight"], given.get("bias"))
        if func in MATRIX_PRODUCTS and len(args) == 2 and args[1].ndim == 2:
            return MatrixProduct(args[0], args[1].T, None)
        if func in MATRIX_PRODUCTS and len(args) == 2 and args[0].ndim == 2:
            return MatrixProduct(args[1].mT, args[0], None, features_first=True)
        if func is torch.addmm and len(args) == 3 and not kwargs:
            return MatrixProduct(args[1], args[2].T, args[0])
        if func is torch.einsum and len(args) == 3:
            return next((read for x, w in ((1, 2), (2, 1)) if (read := self._read_einsum(args, x, w))), None)
        if func in CONVOLUTION_FUNCTIONS and self._convolutions:
            return self._read_convolution(args, kwargs)
        return None

    def _read_convolution(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> MatrixProduct | None:
        """Interpret a function call as a convolution that one of the known modules computes; None if it is not. The
        weight is [d_out, d_in / groups, *kernel]."""
        given = (
            _CONVOLUTION_DEFAULTS
            | dict(zip(("input", "weight", "bias", *_CONVOLUTION_DEFAULTS), args, strict=False))
            | dict(kwargs)
        )
        weight = self._find(given["weight"])
        module = None if weight is None else self._convolutions.get(weight.parameter)
        if module is None or given["weight"].shape != module.weight.shape or module.padding_mode != "zeros":
            return None
        for name in _CONVOLUTION_DEFAULTS:
            own, called = getattr(module, name), given[name]
            if own != (called if isinstance(called, (str, tuple)) or isinstance(own, int) else (called,) * len(own)):
                return None
        return MatrixProduct(given["input"], module.get_parameter("weight"), given.get("bias"))

    def _read_einsum(self, args: tuple[Any, ...], x_at: int, weight_at: int) -> MatrixProduct | None:
        """Interpret an einsum as a product that sums over the last dimensions of x [.., *in] and gives [.., *out]; None
        if it does not."""
        x, weight, (inputs, _, out) = args[x_at], args[weight_at], args[0].replace(" ", "").partition("->")
        if not isinstance(weight, Tensor) or self._find(weight) is None:
            return None
        of_x, of_weight = (inputs.split(",")[at - 1] for at in (x_at, weight_at))
        summed, made = ([letter for letter in of_weight if (letter in of_x) == is_in] for is_in in (True, False))
        rows = [letter for letter in of_x if letter not in summed]
        whole = "".join(rows + made) == out and sorted(rows + summed) == sorted(of_x) and "." not in inputs
        if not whole or set(summed) & set(out):
            return None
        at = [of_weight.index(letter) for letter in made + summed]
        matrix = weight.permute(at)
        sizes = [prod(matrix.shape[: len(made)]), prod(matrix.shape[len(made) :])]
        try:
            matrix = matrix.view(sizes)
        except RuntimeError:  # its elements are not evenly apart
            return None
        rows_first = x.permute([of_x.index(letter) for letter in rows + summed])
        flat = rows_first.reshape(*rows_first.shape[: len(rows)], sizes[1])
        return MatrixProduct(flat, matrix, None)

    def _find(self, x: Tensor) -> ParameterSlice | None:
        """Return the slice of a parameter that a tensor is a view of; None if it is not in the memory of any of the
        parameters."""
        storage = x.untyped_storage()._cdata
        for name, parameter in self._parameters.items():
            offset = int(x.storage_offset()) - int(parameter.storage_offset())
            if parameter.untyped_storage()._cdata == storage and 0 <= offset < parameter.numel():
                return ParameterSlice(name, offset, tuple(x.shape), x.stride())
        return None


_CONVOLUTION_DEFAULTS: dict[str, Any] = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
"""Arguments of torch's convolution functions, with their defaults."""


_attend = FunctionType(
    functional.multi_head_attention_forward.__code__,
    {**vars(functional), "has_torch_function": lambda _: False},
    "multi_head_attention_forward",
    functional.multi_head_attention_forward.__defaults__,
)
"""A copy of torch's multi-head attention without its dispatch check, so that the interceptor sees the products inside
it instead of one opaque call."""
