"""Seconds and bytes of a vision encoder on the first stage.

Its layers are counted as those of a dense language model whose samples are the patches of one
image, with these differences:

- No score is masked, so attention takes twice as long as causal attention.
- Context parallelism does not divide it: each of its ranks encodes all images of a sample.
- MLPs of two products, as wide as the patches that they merge, make tokens of the language model.
- A frozen encoder runs only F. It holds nothing for B, and its weights have no gradient. So does
  the encoder of a frozen model, whose adapters are those of the language model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_zb.plan.byte_counts import (
    GRADIENT,
    OPTIMIZER,
    WEIGHT,
    ActivationBytes,
    StateBytes,
    layer_held,
    rank_states,
)
from megatron_zb.plan.model import Encoder, ModelConfig
from megatron_zb.plan.operators import model_flops
from megatron_zb.plan.work import PassSeconds, Workload


@dataclass(frozen=True)
class CountedEncoder:
    """The encoder of a workload's model: its work, bytes and FLOPs on one rank of the first stage.

    A model without one counts nothing.
    """

    load: Workload

    @property
    def _encoder(self) -> Encoder | None:
        return self.load.model.encoder

    @property
    def _frozen(self) -> bool:
        return self.load.frozen or (self._encoder is not None and self._encoder.frozen)

    @property
    def _layers(self) -> Workload:
        """The layers as a workload, a sample for each image."""
        encoder, strategy = self._encoder, self.load.strategy
        assert encoder is not None
        microbatch = strategy.microbatch * encoder.images
        replaced = replace(strategy, microbatch=microbatch, context=1, slices=1, by_time=False)
        return replace(
            self.load, model=_as_decoder(encoder), strategy=replaced, sequence=encoder.patches
        )

    @property
    def _merging_weights(self) -> int:
        """Weights of the MLPs between encoder and language model."""
        encoder = self._encoder
        assert encoder is not None
        wide = encoder.merged * encoder.hidden_size
        return encoder.mergers * wide * (wide + self.load.model.hidden_size)

    @property
    def _merged(self) -> Workload:
        """The MLPs that merge as a workload, a sample for each image."""
        layers = self._layers
        assert self._encoder is not None
        return replace(layers, sequence=self._encoder.patches // self._encoder.merged)

    @property
    def work(self) -> PassSeconds:
        """Seconds of a microbatch."""
        if self._encoder is None:
            return PassSeconds()
        layers = self._layers
        whole = layers.layer(0) + layers.scores(0)  # the masked half of the scores, too
        work = whole * self._encoder.layers + self._merged.products(self._merging_weights)
        return PassSeconds(work.forward) if self._frozen else work

    @property
    def held(self) -> ActivationBytes:
        """Bytes of a microbatch; of the MLPs that merge, the inputs and gradients of products."""
        if self._encoder is None or self._frozen:
            return ActivationBytes()
        wide = self._encoder.merged * self._encoder.hidden_size
        numbers = self._encoder.mergers * (3 * wide + self.load.model.hidden_size)
        merging = 2 * numbers * self._merged.tokens / self.load.strategy.tensor
        layer = layer_held(self._layers, 0)
        return layer * self._encoder.layers + ActivationBytes(merging, merging, layer.in_backward)

    @property
    def states(self) -> StateBytes:
        """Bytes from step to step."""
        if self._encoder is None:
            return StateBytes()
        layers = replace(self._layers, frozen=self._frozen)
        found = rank_states(layers, range(self._encoder.layers), embedding=False, output=False)
        here = self._merging_weights / self.load.strategy.tensor
        if layers.frozen:
            return found + StateBytes(WEIGHT * here)
        sharded = OPTIMIZER * here / self.load.strategy.replicas
        return found + StateBytes(WEIGHT * here, GRADIENT * here, sharded, here)

    def flops(self, samples: float) -> float:
        """Count the FLOPs that training on a number of samples needs; F alone of a frozen one."""
        if self._encoder is None:
            return 0.0
        patches = self._encoder.patches
        images = samples * self._encoder.images
        model = self._layers.model
        layers = model_flops(model, round(images * patches), patches, all_scores=True)
        merging = 6 * images * patches / self._encoder.merged * self._merging_weights
        return (layers + merging) / (3 if self._frozen else 1)


def _as_decoder(encoder: Encoder) -> ModelConfig:
    """Return layers like those of an encoder as a language model."""
    shared = {"layers", "hidden_size", "attention_heads", "ffn_hidden_size", "gated_mlp"}
    return ModelConfig(
        name="encoder",
        source="encoder",
        vocabulary=1,
        sequence_length=encoder.patches,
        global_batch_size=1,
        **encoder.model_dump(include=shared),
    )
