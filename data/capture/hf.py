"""Hidden states of a target that runs in this process, through transformers."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from data.target import TargetHead, TargetModules, check_aux_layer_ids
from eagle31.errors import UserError

_PROBE_TOKENS = 16


class HiddenStateCapture:
    """Runs the frozen target's decoder and keeps a few layers' inputs.

    Id i is the input of decoder layer i (0 the embedding's output); id `num_layers` is the last layer's
    output before the final norm. Only these are ever held, and the lm_head is not run.

    Args:
        aux_layer_ids: sorted, distinct, within 0..num_layers.
        output_device: where results are put; the embedding's device when None.

    Raises:
        UserError: `aux_layer_ids` are not as said.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        modules: TargetModules,
        aux_layer_ids: Sequence[int],
        output_device: torch.device | None = None,
    ) -> None:
        self.model = model
        self.modules = modules
        self.aux_layer_ids = check_aux_layer_ids(aux_layer_ids, len(modules.layers))
        weight = modules.embed_tokens.get_parameter("weight")
        self.hidden_size = weight.shape[1]
        self.dtype = weight.dtype
        self.input_device = weight.device
        self.output_device = output_device or weight.device

    def capture(self, batch: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """One padded forward pass; the caller puts sequences of like length together.

        Args:
            batch: int64 [T_i] each.

        Returns:
            (aux [T_i, A, Ht], last [T_i, Ht]) each, in the target's dtype; `last` is before the final norm.
        """
        # Causal attention never looks right, so right padding needs no mask.
        input_ids = nn.utils.rnn.pad_sequence(list(batch), batch_first=True).to(self.input_device)
        states = self._run(input_ids)
        # Copied outside of inference mode: training cannot differentiate through inference tensors.
        return [self._copy_row(states, row, len(ids)) for row, ids in enumerate(batch)]

    def _copy_row(self, states: dict[int, Tensor], row: int, length: int) -> tuple[Tensor, Tensor]:
        aux = [states[i][row, :length].to(self.output_device) for i in self.aux_layer_ids]
        last = states[len(self.modules.layers)][row, :length].to(self.output_device)
        return torch.stack(aux, dim=1), last.clone()

    @torch.inference_mode()
    def _run(self, input_ids: Tensor) -> dict[int, Tensor]:
        """input_ids [B, T] -> states [B, T, Ht] by layer id, `num_layers` included."""
        states: dict[int, Tensor] = {}

        def keep(layer_id: int, _module: nn.Module, args: tuple, kwargs: dict) -> None:
            states[layer_id] = args[0] if args else kwargs["hidden_states"]

        num_layers = len(self.modules.layers)
        hooked = [(i, self.modules.layers[i]) for i in self.aux_layer_ids if i < num_layers]
        hooked.append((num_layers, self.modules.final_norm))
        handles = [m.register_forward_pre_hook(partial(keep, i), with_kwargs=True) for i, m in hooked]
        try:
            self.modules.decoder(input_ids=input_ids, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return states


def check_head(capture: HiddenStateCapture, head: TargetHead) -> None:
    """Checks on a few tokens that the head over the captured state gives the model's own logits.

    Raises:
        UserError: it does not, as in models that scale or cap their logits behind the lm_head.
    """
    vocab_size = capture.modules.embed_tokens.get_parameter("weight").shape[0]
    probe = torch.randint(vocab_size, (_PROBE_TOKENS,), generator=torch.Generator().manual_seed(0))
    [(_, last)] = capture.capture([probe])
    with torch.inference_mode():
        ours = head(last.to(head.weight.device)).float().cpu()
        model_ids = probe[None].to(capture.input_device)
        theirs = capture.model(input_ids=model_ids, use_cache=False).logits[0].float().cpu()
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    tolerance = 1e-3 if head.weight.dtype == torch.float32 else 5e-2
    if not error <= tolerance:
        remedy = (
            f"The logits of {type(capture.model).__name__} differ from lm_head(norm(state)) by {error:.1%} "
            "of the largest: it scales or caps them, which is not supported; choose another target."
        )
        raise UserError("target.model", capture.model.config._name_or_path, remedy)
