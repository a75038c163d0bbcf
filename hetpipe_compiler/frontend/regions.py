"""``no_grad`` and ``autocast`` regions, and what may hold one.

Export makes a sub-graph of each region. A sub-graph could not be cut and would hide what it writes, so its nodes move
into the main graph and each remembers the contexts that it runs in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from operator import getitem
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import fx
from torch._export.passes import replace_set_grad_with_hop_pass

#: ``("grad", enabled)`` or ``("autocast", device type, dtype, enabled)``; a node's contexts are listed outermost first.
Context: TypeAlias = tuple[Any, ...]

_KEY = "hetpipe_contexts"


def contexts_of(node: fx.Node) -> tuple[Context, ...]:
    """The regions that a node runs in, outermost first."""
    found: tuple[Context, ...] = node.meta.get(_KEY, ())
    return found


def enter(contexts: tuple[Context, ...]) -> contextlib.ExitStack:
    """The contexts, for real."""
    stack = contextlib.ExitStack()
    for kind, *rest in contexts:
        if kind == "grad":
            stack.enter_context(torch.set_grad_enabled(rest[0]))
        else:
            device, dtype, enabled = rest
            stack.enter_context(torch.autocast(device, dtype, enabled))
    return stack


@contextlib.contextmanager
def autocast_on_cpu() -> Iterator[None]:
    """Let ``torch.autocast("cuda")`` and ``("meta")`` act on the CPU tensors that the model is captured with.

    Without a GPU torch would switch the former off, and refuse the latter.
    """
    original = torch.amp.autocast_mode.autocast.__init__

    def init(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type in ("cuda", "meta"):
            if dtype is None and device_type == "cuda":
                dtype = torch.get_autocast_dtype("cuda")
            device_type = "cpu"
        original(self, device_type, dtype, *args, **kwargs)

    with mock.patch.object(torch.amp.autocast_mode.autocast, "__init__", init):
        yield


@contextlib.contextmanager
def no_grad_kept_in_autocast() -> Iterator[None]:
    """Let export see where gradients are switched inside autocast.

    It splits the graph where they are, each part enters the autocast that it lies in, and the switch, which now comes
    second, is not found any more: the part would get gradients.
    """

    # Any of its nodes may be the switch, not the first alone.
    def switches(node: fx.Node, omit_if_same_with_ambient: bool = False) -> bool:
        if node.op != "call_module":
            return False
        owner = node.graph.owning_module
        assert owner is not None
        part = owner.get_submodule(str(node.target))
        assert isinstance(part, fx.GraphModule)
        switched = [n.args[0] for n in part.graph.nodes if n.target is torch._C._set_grad_enabled]
        return bool(switched) and not (omit_if_same_with_ambient and switched[0] == torch.is_grad_enabled())

    name = "_is_set_grad_enabled_sub_mod"
    if hasattr(replace_set_grad_with_hop_pass, name):
        with mock.patch.object(replace_set_grad_with_hop_pass, name, switches):
            yield
    else:  # a version of torch that does it in another way
        yield


def inline_regions(graph_module: fx.GraphModule) -> None:
    """Move the nodes of all regions into the graph itself; its Python is not written anew."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if _context(node) is None:
            continue
        with graph.inserting_before(node):
            result = _copy_region(graph, node, graph_module, {n: n for n in node.all_input_nodes}, ())
        if isinstance(result, (tuple, list)):
            for user in list(node.users):
                assert user.target is getitem
                user.replace_all_uses_with(result[user.args[1]])
                graph.erase_node(user)
        else:
            node.replace_all_uses_with(result)
        graph.erase_node(node)
    for node in [n for n in graph.nodes if n.op == "get_attr" and not n.users]:
        graph.erase_node(node)
    if not any(c[0] == "autocast" and c[3] for n in graph.nodes for c in contexts_of(n)):
        # Nothing switches autocast on: switching it off means nothing.
        for node in graph.nodes:
            node.meta[_KEY] = tuple(c for c in contexts_of(node) if c[0] != "autocast")
    graph_module.delete_all_unused_submodules()


def uses_autocast(graph: fx.Graph) -> bool:
    """Whether some node runs under autocast."""
    return any(c[0] == "autocast" for n in graph.nodes for c in contexts_of(n))


def text_with_regions(graph_module: fx.GraphModule) -> str:
    """What a graph computes, with the sub-graphs of its regions, as a text to compare."""
    return "\n".join(str(module.graph) for module in graph_module.modules() if isinstance(module, fx.GraphModule))


def _context(node: fx.Node) -> Context | None:
    """What a region node switches; None for other nodes."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
        return None
    if str(node.target) == "wrap_with_set_grad_enabled":
        return ("grad", node.args[0])
    if str(node.target) == "wrap_with_autocast":
        # Whether casts are cached is left to torch's default: export itself switches the cache off.
        return ("autocast", *node.args[:3])
    return None


def _copy_region(
    graph: fx.Graph,
    region: fx.Node,
    owner: fx.GraphModule,
    values: Mapping[fx.Node, Any],
    outer: tuple[Context, ...],
) -> Any:
    """Copy the nodes of ``region``'s sub-graph to the graph's insertion point; returns what the region returns."""
    context = _context(region)
    assert context is not None
    at = 1 if context[0] == "grad" else 4
    submodule = region.args[at]
    assert isinstance(submodule, fx.Node)
    inner = owner.get_submodule(str(submodule.target))
    assert isinstance(inner, fx.GraphModule)
    operands = iter(region.args[at + 1 :])
    env: dict[fx.Node, Any] = {}
    contexts = (*outer, context)
    for node in inner.graph.nodes:
        if node.op == "placeholder":
            operand = next(operands)
            env[node] = values[operand] if isinstance(operand, fx.Node) else operand
        elif node.op == "output":
            return fx.node.map_arg(node.args[0], lambda n: env[n])
        elif node.op == "get_attr":
            assert all(_context(user) is not None for user in node.users), f"region holds {node.target}"
        elif _context(node) is not None:
            env[node] = _copy_region(graph, node, inner, env, contexts)
        elif node.target is getitem and isinstance(env[node.args[0]], (tuple, list)):
            env[node] = env[node.args[0]][node.args[1]]
        else:
            env[node] = graph.node_copy(node, lambda n: env[n])
            env[node].meta[_KEY] = contexts
    raise AssertionError("a region without output")
