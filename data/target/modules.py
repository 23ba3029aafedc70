"""Finding the decoder layers, final norm, embedding and lm_head of a target."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from transformers import PreTrainedModel

from eagle31.errors import UserError


@dataclass(frozen=True)
class TargetModules:
    """The modules of a target that capture and the head need."""

    decoder: nn.Module  # owns the layers; its forward pass on input_ids runs everything but the lm_head
    layers: nn.ModuleList
    final_norm: nn.Module
    embed_tokens: nn.Module
    lm_head: nn.Module


def locate(model: PreTrainedModel) -> TargetModules:
    """Find the modules of a target, also inside multimodal wrappers.

    The decoder is the module that has the model's embedding and as many layers as its text config says. The
    first norm after the layers is the final one.

    Raises:
        UserError: the model is no decoder of this form.
    """
    embed_tokens, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    num_layers = model.config.get_text_config().num_hidden_layers
    for decoder in model.modules():
        children = list(decoder.children())
        for index, layers in enumerate(children):
            if isinstance(layers, nn.ModuleList) and len(layers) == num_layers and embed_tokens in children:
                others = children[index + 1 :] + children[:index]
                norm = next((child for child in others if "norm" in type(child).__name__.lower()), None)
                if norm is not None and lm_head is not None:
                    return TargetModules(decoder, layers, norm, embed_tokens, lm_head)
    remedy = (
        f"{type(model).__name__} has no lm_head, or no module with the embedding, {num_layers} layers and a "
        "norm: choose a causal language model."
    )
    raise UserError("target.model", model.config._name_or_path, remedy)


@contextmanager
def layer_inputs(
    modules: TargetModules, keepers: Iterable[tuple[int, Callable[[Tensor], None]]]
) -> Iterator[None]:
    """Give the inputs of layers, [B, T, Ht], to functions while the model runs.

    Of several residual streams it is the mean, as in vLLM's aux hidden states (models/deepseek_v4).

    Args:
        keepers: layer ids, where `num_layers` is the final norm, with a function each.
    """

    def give(keep: Callable[[Tensor], None], _module: nn.Module, args: tuple, kwargs: dict) -> None:
        states: Tensor = args[0] if args else kwargs["hidden_states"]
        keep(states.mean(dim=2) if states.dim() == 4 else states)

    hooked = [*modules.layers, modules.final_norm]
    with ExitStack() as hooks:
        for layer_id, keep in keepers:
            hook = hooked[layer_id].register_forward_pre_hook(partial(give, keep), with_kwargs=True)
            hooks.enter_context(hook)
        yield
