"""EAGLE 3.1 drafters: model, rollout, loss, acceptance, speculative decoding, export."""
