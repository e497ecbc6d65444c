"""FeatCal written as plainly as possible, to compare the engine with: whole-model forwards with hooks, float64,
every feature kept, the equations as the paper prints them. Shares no code with featcal_cli."""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from family import Family
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

EPSILON = 1e-8
OTHER_TOKENS = 0.01
"""Weight of a token that is not the first, where only the first is read."""


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
EXPERT_TURNS = (r"\.(gate_up_proj|w1|v1|wi|fc1)\b", r"\.(down_proj|w2|wo|fc2)\b")
"""Matrices of a mixture's experts: after the rest of a block, the second ones on what the first ones give."""
LEAST_ROUTED = 32
"""Tokens from which an expert of a mixture is calibrated."""


class Numbers(NamedTuple):
    """λ, ρ and α."""

    ridge: float
    rho: float
    alpha: float


@dataclass(frozen=True)
class Routed:
    """What a mixture in one run gives the matrices of its experts."""

    choice: list[tuple[Any, ...]]  # what it calls its experts with, but for the features
    inputs: dict[str, tuple[Tensor, Tensor, Tensor]]  # by matrix: x [n, d_in], tokens [n], gates [n]


@dataclass(frozen=True)
class Share:
    """What one task contributes to one module: rows that count, of all calls together."""

    expert: Any
    x_cal: Tensor  # [T, d_in]
    x_exp: Tensor  # [T, d_in]
    weights: Tensor  # [T, 1], summing to 1


def calibrate_slowly(
    student: PreTrainedModel,
    base: PreTrainedModel,
    experts: Sequence[PreTrainedModel],
    examples: Sequence[Mapping[str, Tensor]],
    family: Family,
    numbers: Numbers,
    *,
    all_norms: bool = False,
    turns: Sequence[str] = ("",),
) -> dict[str, Tensor]:
    """The calibrated parameters of the student's blocks by name, in float64; the student is changed. turns: patterns of
    paths inside blocks: what matches one is solved at once, on the features that those before it have left."""
    for model in (student, base, *experts):
        to_float64(model)
    found: dict[str, Tensor] = {}
    # experts never change, so that one forward shows their features in all blocks
    targets = [record_all(expert, "", batch, family) for expert, batch in zip(experts, examples, strict=True)]
    for block, turn in itertools.product(family.block_names, (*turns, *EXPERT_TURNS)):
        if turn in EXPERT_TURNS:
            if _find_experts(student, block):
                given = student, base, experts, block, turn, examples, family, numbers
                _load(student, _calibrate_experts(*given), found)
            continue
        features = [record_all(student, block, batch, family) for batch in examples]
        new: dict[str, Tensor] = {}
        for path in modules_to_calibrate(student, block, family, all_norms=all_norms):
            if path not in features[0] or not re.search(turn, path.removeprefix(block)):
                continue  # nothing in the examples calls it, or it has another turn
            shares = []
            for expert, cal, exp, batch in zip(experts, features, targets, examples, strict=True):
                calls = enumerate(cal[path])
                weights = [token_weights(path, n, x, family, batch, first=family.cls == block) for n, x in calls]
                weight = torch.cat([of[of > 0] for of in weights])
                both = (zip(xs[path], weights, strict=True) for xs in (cal, exp))
                x_cal, x_exp = (torch.cat([x[of > 0] for x, of in pairs]) for pairs in both)
                shares.append(Share(module_at(expert, path), x_cal, x_exp, (weight / weight.sum()).unsqueeze(1)))
            module, anchor = module_at(student, path), module_at(base, path)
            if isinstance(module, Matrix):
                module.put(_linear(path, module, anchor, shares, numbers), new)
            elif isinstance(module, CONVOLUTIONS):
                new |= _convolution(path, module, anchor, shares, numbers)
            elif isinstance(module, (nn.Linear, Conv1D)):
                new |= _linear(path, module, anchor, shares, numbers)
            else:
                new |= _norm(path, module, anchor, shares, numbers)
        _load(student, new, found)
    return found


def _load(student: PreTrainedModel, new: Mapping[str, Tensor], found: dict[str, Tensor]) -> None:
    for name, value in new.items():
        student.get_parameter(name).data = value
    found |= new


def to_float64(model: PreTrainedModel) -> PreTrainedModel:
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the grouped matrix products know no float64
    for module in model.modules():
        if "dtype" in vars(module):
            module.dtype = torch.float64  # routers that cast their weights to a precision of their own
    return model.double().eval()


def modules_to_calibrate(model: PreTrainedModel, block: str, family: Family, *, all_norms: bool) -> list[str]:
    owners = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    return [
        path
        for path, module in model.get_submodule(block).named_modules(prefix=block)
        if isinstance(module, (nn.Linear, Conv1D, *CONVOLUTIONS))
        or (is_norm(module) and (all_norms or _bias(module) is not None))
        if all(owners[id(parameter)] == 1 for parameter in module.parameters(recurse=False))
        and not re.search(family.stays, path)
        and not (_find_experts(model, block) and re.search(r"\.(router|gate|experts)(\.|$)", path))
    ] + [
        path
        for whole, value in model.get_submodule(block).named_parameters(prefix=block)
        for path in (whole, *(f"{whole}[{number}]" for number in range(len(value)) if value.ndim == 3))
        if re.search(family.functional, path) and not whole.endswith("_bias")
    ]


def _find_experts(model: PreTrainedModel, block: str) -> list[str]:
    """Paths of a block's modules that hold the experts of a mixture."""
    return [path for path, _ in model.get_submodule(block).named_modules(prefix=block) if path.endswith(".experts")]


def _route(model: PreTrainedModel, block: str, batch: Mapping[str, Tensor], choice: Routed | None = None) -> Routed:
    """What a block's mixture gives its experts, in one forward of the model; with the choice of another run, if any."""
    routed = Routed([], {})
    handles, scores = [], dict[str, Tensor]()
    for number, path in enumerate(_find_experts(model, block)):
        module: Any = model.get_submodule(path)

        def keep(_: nn.Module, args: Any, path: str = path, module: Any = module, number: int = number) -> Any:
            x, *chosen = args
            chosen = chosen or [scores[path]]
            chosen = chosen if choice is None else list(choice.choice[number])
            routed.choice.append(tuple(chosen))
            for name, *rows in _give_tokens(module, x.reshape(-1, x.shape[-1]), *chosen):
                routed.inputs[f"{path}.{name}"] = (rows[0], rows[1], rows[2])
            return (x, *chosen) if len(args) > 1 else None

        def choose(_: nn.Module, __: Any, output: Any, path: str = path, number: int = number) -> Any:
            scores[path] = output[0] if choice is None else choice.choice[number][0]
            return (scores[path], *output[1:])

        handles.append(module.register_forward_pre_hook(keep))
        if takes_all(module):
            handles.append(model.get_submodule(path.replace(".experts", ".router")).register_forward_hook(choose))
    with torch.no_grad(), mock.patch.object(nn.functional, "softmax", _softmax):
        model(**{name: value.double() if value.is_floating_point() else value for name, value in batch.items()})
    for handle in handles:
        handle.remove()
    return routed


def takes_all(experts: nn.Module) -> bool:
    """Whether experts are given all tokens, zero but for those that they are chosen for: Llama 4."""
    return type(experts).__name__.startswith("Llama4")


def _give_tokens(
    experts: Any, x: Tensor, index: Tensor, gates: Tensor | None = None
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Every matrix of the experts, with its input, the tokens that it is of, and their gates."""
    for number in range(experts.num_experts):
        if gates is None:  # index is scores [T, E], and x has been multiplied with them
            tokens = index[:, number].nonzero()[:, 0]
            given = x.view(experts.num_experts, len(index), -1)[number, tokens]
            gate, up = (given @ experts.gate_up_proj[number]).chunk(2, -1)
            yield f"gate_up_proj[{number}]", given, tokens, torch.ones(len(tokens))
            yield f"down_proj[{number}]", up * experts.act_fn(gate), tokens, torch.ones(len(tokens))
            continue
        if isinstance(experts, nn.ModuleDict):  # index is 1 at the expert [T, 1, E]
            expert: Any = experts[f"expert_{number}"]
            if index.ndim == 2:  # NLLB takes 0 and 1 for experts, once for each column
                tokens, places = (index == number).nonzero(as_tuple=True)
                given, of_token, names = x[tokens], gates[tokens, places], ("fc1", "fc2")
            else:
                tokens = index[:, 0, number].nonzero()[:, 0]
                given, of_token, names = x[tokens], gates[tokens, 0], ("wi", "wo")
            first = getattr(expert, names[0])
            yield f"expert_{number}.{names[0]}", given, tokens, of_token
            yield f"expert_{number}.{names[1]}", expert.act(first(given)), tokens, of_token
            continue
        tokens, places = (index == number).nonzero(as_tuple=True)
        given, of_token = x[tokens], gates[tokens, places]
        if hasattr(experts, "mlp"):  # DBRX
            size = experts.ffn_hidden_size
            part = slice(number * size, (number + 1) * size)
            w1, v1 = (given @ w[part].T for w in (experts.mlp.w1, experts.mlp.v1))
            where = f"[{part.start}:{part.stop}]"
            yield f"mlp.w1{where}", given, tokens, of_token
            yield f"mlp.v1{where}", given, tokens, of_token
            yield f"mlp.w2{where}", experts.mlp.activation_fn(w1) * v1, tokens, of_token
            continue
        is_wide = getattr(experts, "gate_up_proj_bias", None) is not None
        weight = experts.gate_up_proj[number]
        both = given @ weight + experts.gate_up_proj_bias[number] if is_wide else given @ weight.T
        yield f"gate_up_proj[{number}]", given, tokens, of_token
        yield f"down_proj[{number}]", experts._apply_gate(both), tokens, of_token


def _calibrate_experts(
    student: PreTrainedModel,
    base: PreTrainedModel,
    experts: Sequence[PreTrainedModel],
    block: str,
    turn: str,
    examples: Sequence[Mapping[str, Tensor]],
    family: Family,
    numbers: Numbers,
) -> dict[str, Tensor]:
    """The parameters that hold a mixture's experts, with new matrices of those whose turn it is, from the tokens that
    the student routes to each."""
    own = [_route(student, block, batch) for batch in examples]
    others = [_route(expert, block, x, of) for expert, x, of in zip(experts, examples, own, strict=True)]
    new: dict[str, Tensor] = {}
    for path in {path: None for routed in own for path in routed.inputs if re.search(turn, path)}:
        shares = []
        for expert, cal, exp, batch in zip(experts, own, others, examples, strict=True):
            x_cal, tokens, gates = cal.inputs[path]
            mask = family.mask(path, 0, dict(batch))
            weights = gates.double().square() * (1 if mask is None else mask.flatten()[tokens])
            kept = weights > 0
            if kept.any():
                total = (weights[kept] / weights.sum()).unsqueeze(1)
                shares.append(Share(Matrix(expert, path), x_cal[kept], exp.inputs[path][0][kept], total))
        if sum(len(share.x_cal) for share in shares) >= LEAST_ROUTED:
            module = Matrix(student, path)
            module.put(_linear(path, module, Matrix(base, path), shares, numbers), new)
    return new


class Matrix:
    """What a function multiplies with: a parameter [d_out, d_in], of XLNet [d_in, heads, d] and [d_out, heads, d]; or
    one of several matrices in a parameter, as those of a mixture's experts, which GPT-OSS and DBRX's last transpose."""

    def __init__(self, model: PreTrainedModel, path: str) -> None:
        self.path, names = path, dict(model.named_parameters())
        name, _, part = path.removesuffix("]").partition("[")
        self.name = name if name in names else f"{name}.weight"
        start, _, stop = part.partition(":")
        self.part: Any = slice(int(start), int(stop)) if stop else int(start) if part else slice(None)
        biases = (re.sub("_weight$", "_bias", name), f"{name}_bias", f"{name}.bias")
        self.bias_name = next((bias for bias in biases if bias != name and bias in names), "")
        self.wholes = {whole: names[whole].data for whole in (self.name, self.bias_name) if whole}
        of_bias = self.wholes[self.bias_name][self.part] if self.bias_name else None
        self.bias: Any = None if of_bias is None else nn.Parameter(of_bias, requires_grad=False)
        piece = self.wholes[self.name][self.part]
        flat = piece.reshape(len(piece), -1)
        if ".experts." in path:
            holder = model.get_submodule(name.rpartition(".")[0])
            self.is_transposed = f"{name}_bias" in names or name.endswith("mlp.w2") or takes_all(holder)
        else:
            from_left = piece.ndim == 3 and not path.endswith(".o")
            # x W
            self.is_transposed = from_left or bool(re.search(r"rel_logits_proj\.proj$|_gate_weight\[", path))
        self.weight = flat.T if self.is_transposed else flat

    def get_parameter(self, _: str) -> Any:
        return nn.Parameter(self.weight, requires_grad=False)

    def put(self, result: dict[str, Tensor], new: dict[str, Tensor]) -> None:
        weight = result[f"{self.path}.weight"]
        values = {self.name: weight.T if self.is_transposed else weight}
        if self.bias is not None:
            values[self.bias_name] = result[f"{self.path}.bias"]
        for name, value in values.items():
            whole = new.setdefault(name, self.wholes[name].clone())
            whole[self.part] = value.reshape(whole[self.part].shape)


def module_at(model: PreTrainedModel, path: str) -> Any:
    """The module at this path, or what stands for the parameter there."""
    is_parameter = path.partition("[")[0] in dict(model.named_parameters())
    return Matrix(model, path) if is_parameter else model.get_submodule(path)


def is_norm(module: nn.Module) -> bool:
    """LayerNorm, RMSNorm or MobileBERT's NoNorm with a weight [d]; not a batch or group norm."""
    name = type(module).__name__
    weight = getattr(module, "weight", None)
    return re.search("(Layer|RMS|No)_?Norm", name) is not None and isinstance(weight, nn.Parameter) and weight.ndim == 1


def record_all(
    model: PreTrainedModel, block: str, batch: Mapping[str, Tensor], family: Family
) -> dict[str, list[Tensor]]:
    """What `record` keeps of all examples: together, or of each alone and without padding."""
    kept: dict[str, list[Tensor]] = {}
    for part in cut_apart(batch) if family.alone else [batch]:
        for path, calls in record(model, block, part).items():
            kept.setdefault(path, []).extend(calls)
    return kept


PADDED = {
    "attention_mask": ("input_ids", "bbox", "token_type_ids", "input_values", "input_features", "flattened_patches"),
    "decoder_attention_mask": ("decoder_input_ids",),
}
"""Mask → the inputs that it may be about."""


def cut_apart(batch: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Each example alone, cut to the tokens that its masks keep."""
    for row in range(min(map(len, batch.values()))):
        example = {name: value[row : row + 1] for name, value in batch.items()}
        for mask, names in PADDED.items():
            if mask in batch:
                counts = batch[mask][row].bool()
                example |= {name: example[name][:, counts] for name in (mask, *names) if name in example}
        yield example


def record(model: PreTrainedModel, block: str, batch: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """The input of every call of every Linear, Conv1D and norm of the block, in one forward of the model, and the
    patches of every convolution."""
    kept: dict[str, list[Tensor]] = {}
    handles = []
    for path, module in model.get_submodule(block).named_modules(prefix=block):
        if isinstance(module, (nn.Linear, Conv1D, *CONVOLUTIONS)) or is_norm(module):

            def keep(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
                x = (args[0] if args else next(iter(kwargs.values()))).detach().double().clone()
                kept.setdefault(path, []).append(patches(module, x) if isinstance(module, CONVOLUTIONS) else x)

            handles.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    functional: dict[str, list[Tensor]] = {}
    with torch.no_grad(), mock.patch.object(nn.functional, "softmax", _softmax), _functions(model, block, functional):
        model(**{name: value.double() if value.is_floating_point() else value for name, value in batch.items()})
    for handle in handles:
        handle.remove()
    for path, calls in functional.items():
        module = model.get_submodule(path.rpartition(".")[0])
        if isinstance(module, CONVOLUTIONS):
            calls = [patches(module, x) for x in calls]
        if not isinstance(module, (nn.Linear, Conv1D, *CONVOLUTIONS)):
            kept[path] = calls
        elif path.endswith(".weight") and path.removesuffix(".weight") not in kept:
            kept[path.removesuffix(".weight")] = calls
    return kept


@contextmanager
def _functions(model: PreTrainedModel, block: str, kept: dict[str, list[Tensor]]) -> Iterator[None]:
    """Inside, what functions multiply with the block's parameters, as a whole, is kept."""
    start = f"{block}." if block else ""
    names = {x.data_ptr(): name for name, x in model.named_parameters() if name.startswith(start)}
    linear, einsum, attend = nn.functional.linear, torch.einsum, nn.functional.multi_head_attention_forward
    multiply, convolve, multiply_batch = Tensor.__matmul__, nn.functional.conv1d, torch.baddbmm
    queries: list[torch.Size] = []

    def keep(x: Tensor, weight: Tensor) -> None:
        if x.ndim == 2 and queries:  # what attention has flattened
            x = x.view(*queries[-1][:2], -1)
        if name := names.get(weight.data_ptr()):
            kept.setdefault(name, []).append(x.detach().double().clone())

    def keep_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        keep(x, weight)
        return linear(x, weight, bias)

    def keep_convolution(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        keep(x, weight)
        return convolve(x, weight, *args, **kwargs)

    def keep_batch(bias: Tensor | float, x: Tensor, weights: Tensor, **kwargs: Any) -> Tensor:
        if name := names.get(weights.data_ptr()):
            for number, rows in enumerate(x):
                kept.setdefault(f"{name}[{number}]", []).append(rows.detach().double().clone())
        return multiply_batch(torch.as_tensor(bias, dtype=x.dtype), x, weights, **kwargs)

    def keep_product(one: Tensor, other: Tensor) -> Tensor:
        if one.ndim == 2 and other.ndim == 3:  # W x, features before tokens
            keep(other.transpose(1, 2), one)
        elif other.ndim == 2:
            keep(one, other)
        return multiply(one, other)

    def keep_einsum(form: str, x: Tensor, *weight: Tensor) -> Tensor:
        for w in weight:
            keep(x.flatten(2) if form == "ibnd,hnd->ibh" else x, w)
        return einsum(form, x, *weight)

    def keep_attention(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        queries.append(query.shape)
        output = attend(query, *args, **kwargs)
        queries.pop()
        return output

    with (
        mock.patch.object(nn.functional, "linear", keep_linear),
        mock.patch.object(nn.functional, "conv1d", keep_convolution),
        mock.patch.object(torch, "baddbmm", keep_batch),
        mock.patch.object(torch, "bmm", lambda x, weights: keep_batch(0.0, x, weights)),
        mock.patch.object(torch, "einsum", keep_einsum),
        mock.patch.object(Tensor, "__matmul__", keep_product),
        mock.patch.object(nn.functional, "multi_head_attention_forward", keep_attention),
    ):
        yield


def patches(module: Any, x: Tensor) -> Tensor:
    """[B, *positions, C · kernel] of x [B, C, *size], position by position; no more positions than x has."""
    padding = [0] * len(x.shape[2:]) if module.padding == "valid" else module.padding
    padded = nn.functional.pad(x, [side for size in reversed(padding) for side in (size, size)])
    counts = [
        min(size, (size + 2 * pad - apart * (kernel - 1) - 1) // step + 1)
        for size, pad, apart, kernel, step in zip(
            x.shape[2:], padding, module.dilation, module.kernel_size, module.stride, strict=True
        )
    ]
    rows: list[Tensor] = []
    for position in itertools.product(*map(range, counts)):
        window = [
            slice(at * step, at * step + apart * (kernel - 1) + 1, apart)
            for at, step, apart, kernel in zip(
                position, module.stride, module.dilation, module.kernel_size, strict=True
            )
        ]
        index = (slice(None), slice(None), *window)
        rows.append(padded[index].flatten(1))
    return torch.stack(rows, 1).view(len(x), *counts, -1)


def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """In float64 where x is; the masks of float64 are minus infinity in float32, and rows of padding would be NaN."""
    return torch.softmax(x.clamp_min(torch.finfo(x.dtype).min), dim, x.dtype if x.dtype == torch.float64 else dtype)


def token_weights(
    path: str, call: int, x: Tensor, family: Family, batch: Mapping[str, Tensor], *, first: bool
) -> Tensor:
    """Weight of every row of one call's input [..]: 0 for padding."""
    weights = torch.ones(x.shape[:-1], dtype=torch.float64)
    mask = family.mask(path, call, dict(batch))
    if re.search(family.distances, path):
        length = (max(x.shape[0], x.shape[1]) + 1) // 2  # where one example is alone
        return weights * _count_distances(torch.ones(1, length) if mask is None else mask, x)
    if mask is not None:
        weights = weights * _spread(mask, x)
    if first and path.rpartition(".")[2] not in ("k_proj", "v_proj", "key", "value", "qkv"):
        examples = len(next(iter(batch.values())))
        tokens = weights if x.shape[0] == examples else weights.T  # [B, S] or [S, B]
        tokens[:, 1:] *= OTHER_TOKENS
    return weights


def _count_distances(mask: Tensor, x: Tensor) -> Tensor:
    """For a table of distances between tokens [.., 2S or 2S − 1, .., d], the pairs of tokens that are so far apart."""
    (examples, tokens), rows = mask.shape, x.shape[:-1]
    counts = torch.zeros(examples, 2 * tokens)
    for row, one, other in itertools.product(range(examples), range(tokens), range(tokens)):
        if mask[row, one] and mask[row, other]:
            counts[row, one - other + tokens] += 1
    if rows[:1] == (1,):  # one table for all examples; the odd one has no row for a distance of S
        return counts[:, 2 * tokens - rows[1] :].sum(0)
    assert rows == (2 * tokens, examples)
    return counts.T


def _spread(mask: Tensor, x: Tensor) -> Tensor:
    """The mask [B, S] over the leading dimensions of x, in whichever layout x has."""
    rows, (batch, tokens) = x.shape[:-1], mask.shape
    if rows[:2] == (batch, tokens):
        return mask.reshape(batch, tokens, *[1] * (len(rows) - 2))
    if rows == (batch * tokens,):
        return mask.flatten()
    if rows[:2] == (tokens, batch):
        return mask.T.reshape(tokens, batch, *[1] * (len(rows) - 2))
    if len(rows) == 3 and (rows[0], rows[2]) == (batch, tokens):
        return mask[:, None]
    raise AssertionError(f"rows {tuple(rows)} do not fit the mask {tuple(mask.shape)}")


def _weight(module: nn.Module) -> Tensor:
    weight = module.get_parameter("weight").data
    return weight.T if isinstance(module, Conv1D) else weight


def _bias(module: nn.Module) -> Tensor | None:
    bias = getattr(module, "bias", None)
    return bias.data if isinstance(bias, nn.Parameter) else None


def _linear(path: str, module: Any, anchor: Any, shares: Sequence[Share], numbers: Numbers) -> dict[str, Tensor]:
    ridge, rho, alpha = numbers
    system = (ridge + EPSILON) * torch.eye(_weight(module).shape[1], dtype=torch.float64)
    right = ridge * (rho * _weight(module) + (1 - rho) * _weight(anchor))
    omegas, means = [], []
    for share in shares:
        x_tgt = alpha * share.x_exp + (1 - alpha) * share.x_cal
        gram, cross = share.x_cal.T @ (share.weights * share.x_cal), x_tgt.T @ (share.weights * share.x_cal)
        omega = 1 / max(gram.norm().item(), EPSILON)
        omegas.append(omega)
        means.append(((share.weights * share.x_cal).sum(0), (share.weights * x_tgt).sum(0)))
        system = system + omega * gram
        right = right + omega * _weight(share.expert) @ cross
    solved = torch.linalg.solve(system.T, right.T).T
    result = {f"{path}.weight": solved.T.contiguous() if isinstance(module, Conv1D) else solved}
    if module.bias is not None:
        total = ridge * (rho * module.bias.data + (1 - rho) * anchor.bias.data)
        for share, omega, (mean, target) in zip(shares, omegas, means, strict=True):
            total = total + omega * (share.expert.bias.data + _weight(share.expert) @ target - solved @ mean)
        result[f"{path}.bias"] = total / (sum(omegas) + ridge)
    return result


def _convolution(path: str, module: Any, anchor: Any, shares: Sequence[Share], numbers: Numbers) -> dict[str, Tensor]:
    """Group by group, as Linears of its patches."""
    results = []
    for group in range(module.groups):
        modules = (module, anchor, *(share.expert for share in shares))
        student, base, *experts = (_part_of(each, group) for each in modules)
        width = student.in_features
        columns = slice(group * width, (group + 1) * width)
        rows = ((x.x_cal[:, columns], x.x_exp[:, columns], x.weights) for x in shares)
        of_group = [Share(expert, *row) for expert, row in zip(experts, rows, strict=True)]
        results.append(_linear(path, student, base, of_group, numbers))
    whole = {name: torch.cat([result[name] for result in results]) for name in results[0]}
    return whole | {f"{path}.weight": whole[f"{path}.weight"].view(module.weight.shape)}


def _part_of(module: Any, group: int) -> nn.Linear:
    weight = module.weight.data.chunk(module.groups)[group].flatten(1)
    part = nn.Linear(weight.shape[1], weight.shape[0], bias=module.bias is not None, dtype=torch.float64)
    part.weight.data = weight
    if module.bias is not None:
        part.bias.data = module.bias.data.chunk(module.groups)[group]
    return part


def _norm(path: str, module: Any, anchor: Any, shares: Sequence[Share], numbers: Numbers) -> dict[str, Tensor]:
    """Also right where the scale is 1 + weight: with it, both sides of the equations grow by the same."""
    ridge, rho, _ = numbers
    bias, anchor_bias = _bias(module), _bias(anchor)
    anchor_scale = rho * module.weight.data + (1 - rho) * anchor.weight.data
    a11, r_scale = torch.full_like(anchor_scale, ridge), ridge * anchor_scale
    a12, a22, r_bias = torch.zeros_like(anchor_scale), len(shares) + ridge, torch.zeros_like(anchor_scale)
    if bias is not None and anchor_bias is not None:
        r_bias = ridge * (rho * bias + (1 - rho) * anchor_bias)
    for share in shares:
        z = normalise(module, share.x_cal)
        mean, second = (share.weights * z).sum(0), (share.weights * z * z).sum(0)
        a11, a12 = a11 + second, a12 + mean
        r_scale = r_scale + second * share.expert.weight.data
        if bias is not None:
            r_scale = r_scale + mean * share.expert.bias.data
            r_bias = r_bias + mean * share.expert.weight.data + share.expert.bias.data
    if bias is None:
        return {f"{path}.weight": r_scale / a11}
    determinant = (a22 * a11 - a12 * a12).clamp_min(EPSILON)
    return {
        f"{path}.weight": (a22 * r_scale - a12 * r_bias) / determinant,
        f"{path}.bias": (a11 * r_bias - a12 * r_scale) / determinant,
    }


_KEEPS_MEAN = re.compile(r"RMSNorm$|T5LayerNorm$|^(SwitchTransformers|Pix2Struct|CpmAnt|Udop)LayerNorm$")


def normalise(norm: Any, x: Tensor) -> Tensor:
    """Without the affine part; some that are called LayerNorm are not, and NoNorm does nothing else."""
    if type(norm).__name__ == "NoNorm":
        return x
    centred: Tensor = x if _KEEPS_MEAN.search(type(norm).__name__) else x - x.mean(-1, keepdim=True)
    epsilon = next(getattr(norm, key) for key in ("eps", "variance_epsilon") if hasattr(norm, key))
    size: Tensor = centred.square().mean(-1, keepdim=True) + epsilon
    return centred / size.sqrt()
