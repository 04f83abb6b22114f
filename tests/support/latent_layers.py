"""A layer specification with multi-latent attention, for ``--spec latent_layers layer``.

Megatron's local attention does not take the head sizes of multi-latent attention, so that its local
specification builds none of these layers; Transformer-Engine's needs a GPU.
"""

from gpt_cases import LatentAttention
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import multi_latent_attention

multi_latent_attention.HAVE_TE = False  # 0.16 says that there is, everywhere
layer = get_gpt_layer_local_spec(multi_latent_attention=True, normalization="RMSNorm")
layer.submodules.self_attention.submodules.core_attention = LatentAttention
