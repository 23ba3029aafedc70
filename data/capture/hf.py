"""Capture of hidden states by transformers in this process."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from data.target.aux_layers import check_aux_layer_ids
from data.target.head import TargetHead
from data.target.loading import load_target
from data.target.modules import TargetModules, layer_inputs, locate
from data.target.parts import TargetParts
from data.target.spec import TargetSpec
from eagle31.errors import UserError

_PROBE_TOKENS = 16


class HiddenStateCapture:
    """Runs the frozen target's decoder and keeps the inputs of a few layers.

    Id i is the input of decoder layer i (0 the embedding's output); id `num_layers` is the last layer's
    output before the final norm. Only these are held, and the lm_head is not run.

    Args:
        aux_layer_ids: sorted, distinct, within 0..num_layers.

    Raises:
        UserError: `aux_layer_ids` are invalid.
    """

    def __init__(self, model: PreTrainedModel, modules: TargetModules, aux_layer_ids: Sequence[int]) -> None:
        self.model = model
        self.modules = modules
        self.aux_layer_ids = check_aux_layer_ids(aux_layer_ids, len(modules.layers))
        weight = modules.embed_tokens.get_parameter("weight")
        self.hidden_size = weight.shape[1]
        self.dtype = weight.dtype
        self.device = weight.device

    def capture(self, batch: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Capture a batch in one padded forward pass. The caller groups sequences of similar length.

        Args:
            batch: int64 [T_i] each.

        Returns:
            (aux [T_i, A, Ht], final [T_i, Ht]) each, in the target's dtype on the embedding's device; `final`
            is before the final norm. All are views of two tensors.
        """
        # Causal attention does not look to the right, so right padding needs no mask.
        input_ids = nn.utils.rnn.pad_sequence(list(batch), batch_first=True)
        lengths = [len(ids) for ids in batch]
        real = (torch.arange(input_ids.shape[1]) < torch.tensor(lengths)[:, None]).view(-1).nonzero()[:, 0]
        # Made outside of inference mode: training cannot differentiate through inference tensors.
        aux = self._empty(len(real), len(self.aux_layer_ids), self.hidden_size)
        final = self._empty(len(real), self.hidden_size)
        outputs = [(layer_id, aux[:, index]) for index, layer_id in enumerate(self.aux_layer_ids)]
        self._run(
            input_ids.to(self.device), real.to(self.device), [*outputs, (len(self.modules.layers), final)]
        )
        return list(zip(aux.split(lengths), final.split(lengths), strict=True))

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def _run(self, input_ids: Tensor, real: Tensor, outputs: Sequence[tuple[int, Tensor]]) -> None:
        """Run the decoder and fill the outputs.

        Args:
            input_ids: [B, T]
            real: [N], the indices in B * T that are not padding.
            outputs: layer ids, where `num_layers` is the input of the final norm, with a tensor [N, Ht] each.
        """

        def keep(output: Tensor, states: Tensor) -> None:
            # Copied at once: with activations held, the allocator would need new memory for later ones.
            output.copy_(states.flatten(0, 1).index_select(0, real.to(states.device)))

        keepers = [(layer_id, partial(keep, output)) for layer_id, output in outputs]
        with layer_inputs(self.modules, keepers):
            self.modules.decoder(input_ids=input_ids, use_cache=False)


def open_capture(
    spec: TargetSpec, parts: TargetParts, aux_layer_ids: Sequence[int], device: torch.device
) -> HiddenStateCapture:
    """Load the target with its capture hooks, and check that its head gives its logits."""
    model = load_target(spec, device)
    capture = HiddenStateCapture(model, locate(model), aux_layer_ids)
    check_head(capture, parts.head)
    return capture


def check_head(capture: HiddenStateCapture, head: TargetHead) -> None:
    """Check on a few tokens that the head gives the model's own logits for the captured states.

    Raises:
        UserError: the logits are not finite, or differ, as in models that scale or cap them after the
            lm_head.
    """
    vocab_size = capture.modules.embed_tokens.get_parameter("weight").shape[0]
    probe = torch.randint(vocab_size, (_PROBE_TOKENS,), generator=torch.Generator().manual_seed(0))
    [(_, final)] = capture.capture([probe])
    with torch.inference_mode():
        ours = head(final.to(head.weight.device)).float().cpu()
        model_ids = probe[None].to(capture.device)
        theirs = capture.model(input_ids=model_ids, use_cache=False).logits[0].float().cpu()
    if not theirs.isfinite().all():
        remedy = (
            "Its logits are not finite: a weight is damaged, or the dtype is too small; see target.dtype."
        )
        raise UserError("target.model", capture.model.config._name_or_path, remedy)
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    if not error <= head_tolerance(head.weight.dtype, capture.dtype):
        remedy = (
            f"The logits of {type(capture.model).__name__} differ from lm_head(norm(state)) by {error:.1%} "
            "of the largest: it scales or caps them, which is not supported; choose another target."
        )
        raise UserError("target.model", capture.model.config._name_or_path, remedy)


def head_tolerance(*dtypes: torch.dtype) -> float:
    """Return by how much of the largest the logits of computations in these dtypes may differ."""
    return 1e-3 if all(dtype == torch.float32 for dtype in dtypes) else 5e-2
