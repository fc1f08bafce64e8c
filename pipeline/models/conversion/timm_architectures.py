"""The models of timm that can be represented here, and what timm's code sets for each of them.

The tables are compared with the installed timm by tests, and so are the logits of each model.

Sources: vision_transformer.py, vision_transformer_hybrid.py, deit.py, eva.py and naflexvit.py of timm 1.0.31.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.models.config import Gelu
from pipeline.models.conversion.pixel_range import PIXELS, PixelRange

_PAPER, _IMAGENET, _CLIP = PIXELS["paper"], PIXELS["imagenet"], PIXELS["clip"]
_UNIT = PixelRange(mean=(0.0, 0.0, 0.0), deviation=(1.0, 1.0, 1.0))  # [0, 1]
# The rotary positions of timm's eva.py: RoPE-ViT's axial ones, which are the default here, and three others.
AXIAL_ARGUMENTS: dict[str, Any] = {
    "attn_type": "rope",
    "use_abs_pos_emb": False,
    "use_rot_pos_emb": True,
    "rope_grid_indexing": "xy",
    "rope_temperature": 100.0,
}
_EVA02: dict[str, Any] = {"use_rot_pos_emb": True, "ref_feat_shape": 16}
_DINOV3: dict[str, Any] = {
    "use_abs_pos_emb": False,
    "use_rot_pos_emb": True,
    "rope_type": "dinov3",
    "rope_temperature": 100.0,
    "rope_rotate_half": True,
}
_PE: dict[str, Any] = {"use_rot_pos_emb": True, "rope_grid_indexing": "xy", "rope_grid_offset": 1.0}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A timm model. `epsilon` is that of its norms. `pixels` belong to its default weights; other weights of the same
    architecture may have been trained on other pixels."""

    width: int
    num_heads: int
    gelu: Gelu = "exact"
    pixels: PixelRange = _PAPER
    epsilon: float = 1e-6


# The names of each architecture, without the tags of their weights.
_NAMES: dict[Architecture, str] = {
    Architecture(width=192, num_heads=3): """
        vit_tiny_patch16_224 vit_tiny_patch16_224_in21k vit_tiny_patch16_384 vit_tiny_r_s16_p8_224
        vit_tiny_r_s16_p8_224_in21k vit_tiny_r_s16_p8_384
    """,
    Architecture(width=192, num_heads=3, epsilon=1e-5): """
        vit_pe_spatial_tiny_patch16_512
    """,
    Architecture(width=192, num_heads=3, pixels=_CLIP): """
        eva02_tiny_patch14_224 eva02_tiny_patch14_336
    """,
    Architecture(width=192, num_heads=3, pixels=_IMAGENET): """
        deit_tiny_distilled_patch16_224 deit_tiny_patch16_224
    """,
    Architecture(width=192, num_heads=3, pixels=_IMAGENET, epsilon=1e-5): """
        vit_tiny_patch16_dinov3_qkvb
    """,
    Architecture(width=256, num_heads=4): """
        vit_wee_patch16_reg1_gap_256
    """,
    Architecture(width=256, num_heads=4, pixels=_CLIP, epsilon=1e-5): """
        vit_xsmall_patch16_clip_224
    """,
    Architecture(width=320, num_heads=5): """
        vit_little_patch16_reg1_gap_256 vit_little_patch16_reg4_gap_256
    """,
    Architecture(width=384, num_heads=6): """
        flexivit_small vit_small_patch16_224 vit_small_patch16_224_in21k vit_small_patch16_36x1_224
        vit_small_patch16_384 vit_small_patch32_224 vit_small_patch32_224_in21k vit_small_patch32_384
        vit_small_r26_s32_224 vit_small_r26_s32_224_in21k vit_small_r26_s32_384
    """,
    Architecture(width=384, num_heads=6, epsilon=1e-5): """
        vit_pe_spatial_small_patch16_512
    """,
    Architecture(width=384, num_heads=6, pixels=_CLIP): """
        eva02_small_patch14_224 eva02_small_patch14_336
    """,
    Architecture(width=384, num_heads=6, pixels=_IMAGENET): """
        deit3_small_patch16_224 deit3_small_patch16_224_in21ft1k deit3_small_patch16_384
        deit3_small_patch16_384_in21ft1k deit_small_distilled_patch16_224 deit_small_patch16_224
        vit_small_patch14_dinov2 vit_small_patch14_reg4_dinov2 vit_small_patch16_224_dino vit_small_patch16_rope_224
        vit_small_patch16_rope_ape_224 vit_small_patch8_224 vit_small_patch8_224_dino
    """,
    Architecture(width=384, num_heads=6, pixels=_IMAGENET, epsilon=1e-5): """
        vit_small_patch16_dinov3 vit_small_patch16_dinov3_qkvb vit_small_patch16_lingbot vit_small_plus_patch16_dinov3
        vit_small_plus_patch16_dinov3_qkvb
    """,
    Architecture(width=512, num_heads=8): """
        vit_medium_patch16_gap_240 vit_medium_patch16_gap_256 vit_medium_patch16_gap_384 vit_medium_patch16_reg1_gap_256
        vit_medium_patch16_reg4_gap_256 vit_medium_patch16_rope_reg1_gap_256 vit_mediumd_patch16_reg4_gap_256
        vit_mediumd_patch16_reg4_gap_384 vit_mediumd_patch16_rope_reg1_gap_256
    """,
    Architecture(width=512, num_heads=8, pixels=_CLIP, epsilon=1e-5): """
        vit_medium_patch16_clip_224 vit_medium_patch32_clip_224
    """,
    Architecture(width=512, num_heads=8, pixels=_IMAGENET): """
        deit3_medium_patch16_224 deit3_medium_patch16_224_in21ft1k
    """,
    Architecture(width=640, num_heads=10): """
        vit_betwixt_patch16_gap_256 vit_betwixt_patch16_reg1_gap_256 vit_betwixt_patch16_reg4_gap_256
        vit_betwixt_patch16_reg4_gap_384
    """,
    Architecture(width=640, num_heads=10, pixels=_CLIP): """
        vit_betwixt_patch16_rope_reg4_gap_256
    """,
    Architecture(width=640, num_heads=10, pixels=_CLIP, epsilon=1e-5): """
        vit_betwixt_patch32_clip_224
    """,
    Architecture(width=768, num_heads=12): """
        flexivit_base naflexvit_base_patch16_gap naflexvit_base_patch16_map naflexvit_base_patch16_par_gap
        naflexvit_base_patch16_parfac_gap vit_base_patch16_224 vit_base_patch16_224_in21k vit_base_patch16_384
        vit_base_patch16_reg4_gap_256 vit_base_patch16_rope_reg1_gap_256 vit_base_patch16_siglip_224
        vit_base_patch16_siglip_256 vit_base_patch16_siglip_384 vit_base_patch16_siglip_512
        vit_base_patch16_siglip_gap_224 vit_base_patch16_siglip_gap_256 vit_base_patch16_siglip_gap_384
        vit_base_patch16_siglip_gap_512 vit_base_patch32_224 vit_base_patch32_224_in21k vit_base_patch32_384
        vit_base_patch8_224 vit_base_patch8_224_in21k vit_base_r26_s32_224 vit_base_r50_s16_224
        vit_base_r50_s16_224_in21k vit_base_r50_s16_384 vit_base_resnet50_224_in21k vit_base_resnet50_384
    """,
    Architecture(width=768, num_heads=12, epsilon=1e-5): """
        vit_pe_spatial_base_patch16_512
    """,
    Architecture(width=768, num_heads=12, pixels=_CLIP): """
        eva02_base_patch14_224 eva02_base_patch14_448 eva02_base_patch16_clip_224 vit_base_patch16_radio_v3
    """,
    Architecture(width=768, num_heads=12, pixels=_CLIP, epsilon=1e-5): """
        vit_base_patch16_clip_224 vit_base_patch16_clip_384 vit_base_patch32_224_clip_laion2b vit_base_patch32_clip_224
        vit_base_patch32_clip_256 vit_base_patch32_clip_384 vit_base_patch32_clip_448
    """,
    Architecture(width=768, num_heads=12, pixels=_IMAGENET): """
        deit3_base_patch16_224 deit3_base_patch16_224_in21ft1k deit3_base_patch16_384 deit3_base_patch16_384_in21ft1k
        deit_base_distilled_patch16_224 deit_base_distilled_patch16_384 deit_base_patch16_224 deit_base_patch16_384
        vit_base_patch14_dinov2 vit_base_patch14_reg4_dinov2 vit_base_patch16_224_dino vit_base_patch16_rope_224
        vit_base_patch16_rope_ape_224 vit_base_patch16_sapiens2 vit_base_patch8_224_dino
    """,
    Architecture(width=768, num_heads=12, pixels=_IMAGENET, epsilon=1e-5): """
        beit3_base_patch16_224 vit_base_patch16_dinov3 vit_base_patch16_dinov3_qkvb vit_base_patch16_lingbot
    """,
    Architecture(width=768, num_heads=12, pixels=_UNIT): """
        vit_base_patch14_reg1_tipsv2 vit_base_patch16_224_miil vit_base_patch16_224_miil_in21k
    """,
    Architecture(width=768, num_heads=12, gelu="quick", pixels=_CLIP, epsilon=1e-5): """
        vit_base_patch16_clip_quickgelu_224 vit_base_patch32_clip_quickgelu_224
    """,
    Architecture(width=768, num_heads=12, gelu="tanh"): """
        naflexvit_base_patch16_siglip vit_base_patch32_siglip_256 vit_base_patch32_siglip_gap_256
    """,
    Architecture(width=768, num_heads=16): """
        vit_base_patch16_gap_224
    """,
    Architecture(width=832, num_heads=13): """
        naflexvit_so150m2_patch16_reg1_gap naflexvit_so150m2_patch16_reg1_map vit_so150m2_patch16_reg1_gap_256
        vit_so150m2_patch16_reg1_gap_384 vit_so150m2_patch16_reg1_gap_448
    """,
    Architecture(width=896, num_heads=14): """
        vit_base_patch16_plus_240 vit_base_patch32_plus_256 vit_so150m_patch16_reg4_gap_256
        vit_so150m_patch16_reg4_gap_384 vit_so150m_patch16_reg4_map_256
    """,
    Architecture(width=896, num_heads=14, pixels=_CLIP, epsilon=1e-5): """
        vit_base_patch16_plus_clip_240
    """,
    Architecture(width=1024, num_heads=8, pixels=_CLIP, epsilon=1e-5): """
        aimv2_large_patch14_224 aimv2_large_patch14_336 aimv2_large_patch14_448
    """,
    Architecture(width=1024, num_heads=16): """
        flexivit_large vit_large_patch14_224 vit_large_patch16_224 vit_large_patch16_224_in21k vit_large_patch16_384
        vit_large_patch16_siglip_256 vit_large_patch16_siglip_384 vit_large_patch16_siglip_gap_256
        vit_large_patch16_siglip_gap_384 vit_large_patch32_224 vit_large_patch32_224_in21k vit_large_patch32_384
        vit_large_r50_s32_224 vit_large_r50_s32_224_in21k vit_large_r50_s32_384
    """,
    Architecture(width=1024, num_heads=16, epsilon=1e-5): """
        vit_large_patch14_224_clip_laion2b vit_large_patch14_clip_224 vit_large_patch14_clip_336
        vit_pe_lang_large_patch14_448 vit_pe_spatial_large_patch14_448
    """,
    Architecture(width=1024, num_heads=16, pixels=_CLIP): """
        eva02_large_patch14_224 eva02_large_patch14_448 eva02_large_patch14_clip_224 eva02_large_patch14_clip_336
        eva_large_patch14_196 eva_large_patch14_336 vit_large_patch16_radio_v3
    """,
    Architecture(width=1024, num_heads=16, pixels=_IMAGENET): """
        deit3_large_patch16_224 deit3_large_patch16_224_in21ft1k deit3_large_patch16_384
        deit3_large_patch16_384_in21ft1k vit_intern300m_patch14_448 vit_large_patch14_dinov2
        vit_large_patch14_reg4_dinov2 vit_large_patch16_rope_224 vit_large_patch16_rope_ape_224
        vit_large_patch16_sapiens2
    """,
    Architecture(width=1024, num_heads=16, pixels=_IMAGENET, epsilon=1e-5): """
        beit3_large_patch16_224 vit_large_patch16_dinov3 vit_large_patch16_dinov3_qkvb vit_large_patch16_lingbot
    """,
    Architecture(width=1024, num_heads=16, pixels=_UNIT): """
        vit_large_patch14_reg1_tipsv2
    """,
    Architecture(width=1024, num_heads=16, gelu="quick", pixels=_CLIP, epsilon=1e-5): """
        vit_large_patch14_clip_quickgelu_224 vit_large_patch14_clip_quickgelu_336
    """,
    Architecture(width=1024, num_heads=16, gelu="tanh"): """
        vit_large_patch16_siglip_512 vit_large_patch16_siglip_gap_512
    """,
    Architecture(width=1152, num_heads=16): """
        vit_so400m_patch14_siglip_224 vit_so400m_patch14_siglip_378 vit_so400m_patch14_siglip_384
        vit_so400m_patch14_siglip_gap_224 vit_so400m_patch14_siglip_gap_378 vit_so400m_patch14_siglip_gap_384
        vit_so400m_patch14_siglip_gap_448 vit_so400m_patch14_siglip_gap_896
    """,
    Architecture(width=1152, num_heads=16, pixels=_CLIP): """
        vit_so400m_patch16_radio_v4
    """,
    Architecture(width=1152, num_heads=16, pixels=_UNIT): """
        vit_so400m_patch14_reg1_tipsv2
    """,
    Architecture(width=1152, num_heads=16, gelu="tanh"): """
        naflexvit_so400m_patch16_siglip vit_so400m_patch16_siglip_256 vit_so400m_patch16_siglip_384
        vit_so400m_patch16_siglip_512 vit_so400m_patch16_siglip_gap_256 vit_so400m_patch16_siglip_gap_384
        vit_so400m_patch16_siglip_gap_512
    """,
    Architecture(width=1280, num_heads=16): """
        vit_huge_patch14_224 vit_huge_patch14_224_in21k
    """,
    Architecture(width=1280, num_heads=16, pixels=_CLIP): """
        vit_huge_patch16_radio_v3 vit_huge_patch16_radio_v4
    """,
    Architecture(width=1280, num_heads=16, pixels=_CLIP, epsilon=1e-5): """
        vit_huge_patch14_224_clip_laion2b vit_huge_patch14_clip_224 vit_huge_patch14_clip_336 vit_huge_patch14_clip_378
    """,
    Architecture(width=1280, num_heads=16, pixels=_IMAGENET): """
        deit3_huge_patch14_224 deit3_huge_patch14_224_in21ft1k vit_huge_patch14_gap_224 vit_huge_patch16_gap_448
        vit_huge_patch16_sapiens2
    """,
    Architecture(width=1280, num_heads=16, gelu="quick", pixels=_CLIP, epsilon=1e-5): """
        vit_huge_patch14_clip_quickgelu_224 vit_huge_patch14_clip_quickgelu_378
    """,
    Architecture(width=1280, num_heads=20, pixels=_IMAGENET, epsilon=1e-5): """
        vit_huge_plus_patch16_dinov3 vit_huge_plus_patch16_dinov3_qkvb
    """,
    Architecture(width=1408, num_heads=16): """
        vit_giant_patch14_224
    """,
    Architecture(width=1408, num_heads=16, pixels=_CLIP): """
        eva_giant_patch14_224 eva_giant_patch14_336 eva_giant_patch14_clip_224
    """,
    Architecture(width=1408, num_heads=16, pixels=_CLIP, epsilon=1e-5): """
        vit_giant_patch14_224_clip_laion2b vit_giant_patch14_clip_224
    """,
    Architecture(width=1408, num_heads=16, pixels=_IMAGENET): """
        eva_giant_patch14_560 vit_giant_patch16_gap_224
    """,
    Architecture(width=1408, num_heads=16, pixels=_IMAGENET, epsilon=1e-5): """
        beit3_giant_patch14_224 beit3_giant_patch14_336
    """,
    Architecture(width=1536, num_heads=12, pixels=_CLIP, epsilon=1e-5): """
        aimv2_huge_patch14_224 aimv2_huge_patch14_336 aimv2_huge_patch14_448
    """,
    Architecture(width=1536, num_heads=16, epsilon=1e-5): """
        vit_pe_lang_gigantic_patch14_448 vit_pe_spatial_gigantic_patch14_448
    """,
    Architecture(width=1536, num_heads=16, gelu="tanh"): """
        vit_giantopt_patch16_siglip_256 vit_giantopt_patch16_siglip_384 vit_giantopt_patch16_siglip_gap_256
        vit_giantopt_patch16_siglip_gap_384
    """,
    Architecture(width=1536, num_heads=24, pixels=_CLIP): """
        vit_giant_patch16_radio_v3
    """,
    Architecture(width=1536, num_heads=24, pixels=_IMAGENET): """
        vit_giant_patch14_dinov2 vit_giant_patch14_reg4_dinov2 vit_giant_patch16_sapiens2
    """,
    Architecture(width=1536, num_heads=24, pixels=_IMAGENET, epsilon=1e-5): """
        vit_giant_patch16_lingbot
    """,
    Architecture(width=1536, num_heads=24, pixels=_UNIT): """
        vit_giant_patch14_reg1_tipsv2
    """,
    Architecture(width=1664, num_heads=16): """
        vit_gigantic_patch14_224
    """,
    Architecture(width=1664, num_heads=16, pixels=_CLIP, epsilon=1e-5): """
        vit_gigantic_patch14_clip_224 vit_gigantic_patch14_clip_378
    """,
    Architecture(width=1664, num_heads=16, gelu="quick", pixels=_CLIP, epsilon=1e-5): """
        vit_gigantic_patch14_clip_quickgelu_224
    """,
    Architecture(width=2048, num_heads=16, pixels=_CLIP, epsilon=1e-5): """
        aimv2_1b_patch14_224 aimv2_1b_patch14_336 aimv2_1b_patch14_448
    """,
    Architecture(width=2432, num_heads=32, pixels=_IMAGENET): """
        vit_5b_patch16_sapiens2
    """,
    Architecture(width=3072, num_heads=24, pixels=_CLIP, epsilon=1e-5): """
        aimv2_3b_patch14_224 aimv2_3b_patch14_336 aimv2_3b_patch14_448
    """,
    Architecture(width=4096, num_heads=32, pixels=_IMAGENET, epsilon=1e-5): """
        vit_7b_patch16_dinov3
    """,
}
ARCHITECTURES: Mapping[str, Architecture] = {name: each for each, names in _NAMES.items() for name in names.split()}

# Arguments that change what the same tensors compute, where timm's code sets them.
_ARGUMENTS: tuple[tuple[Mapping[str, Any], str], ...] = (
    (
        {"global_pool": "avg"},
        """
        beit3_base_patch16_224 beit3_giant_patch14_224 beit3_giant_patch14_336 beit3_large_patch16_224
        eva_giant_patch14_224 eva_giant_patch14_336 eva_giant_patch14_560 eva_large_patch14_196 eva_large_patch14_336
        """,
    ),
    (
        {"global_pool": "token"},
        """
        eva_giant_patch14_clip_224
        """,
    ),
    (
        _EVA02 | {"global_pool": "avg"},
        """
        eva02_base_patch14_224 eva02_base_patch14_448 eva02_large_patch14_224 eva02_large_patch14_448
        eva02_small_patch14_224 eva02_small_patch14_336 eva02_tiny_patch14_224 eva02_tiny_patch14_336
        """,
    ),
    (
        _EVA02 | {"global_pool": "token"},
        """
        eva02_base_patch16_clip_224 eva02_large_patch14_clip_224 eva02_large_patch14_clip_336
        """,
    ),
    (
        {"global_pool": "token", "use_post_norm": True},
        """
        eva02_enormous_patch14_clip_224
        """,
    ),
    (
        _DINOV3 | {"global_pool": "avg"},
        """
        vit_7b_patch16_dinov3 vit_base_patch16_dinov3 vit_base_patch16_dinov3_qkvb vit_huge_plus_patch16_dinov3
        vit_huge_plus_patch16_dinov3_qkvb vit_large_patch16_dinov3 vit_large_patch16_dinov3_qkvb
        vit_small_patch16_dinov3 vit_small_patch16_dinov3_qkvb vit_small_plus_patch16_dinov3
        vit_small_plus_patch16_dinov3_qkvb vit_tiny_patch16_dinov3_qkvb
        """,
    ),
    (
        _DINOV3 | {"global_pool": "token"},
        """
        vit_5b_patch16_sapiens2 vit_base_patch16_lingbot vit_base_patch16_sapiens2 vit_giant_patch16_lingbot
        vit_giant_patch16_sapiens2 vit_huge_patch16_sapiens2 vit_large_patch16_lingbot vit_large_patch16_sapiens2
        vit_small_patch16_lingbot
        """,
    ),
    (
        AXIAL_ARGUMENTS | {"global_pool": "token"},
        """
        vit_base_patch16_rope_224 vit_large_patch16_rope_224 vit_small_patch16_rope_224
        """,
    ),
    (
        AXIAL_ARGUMENTS | {"global_pool": "token", "use_abs_pos_emb": True, "no_embed_class": True},
        """
        vit_base_patch16_rope_ape_224 vit_large_patch16_rope_ape_224 vit_small_patch16_rope_ape_224
        """,
    ),
    (
        _EVA02 | {"global_pool": "avg", "use_abs_pos_emb": False},
        """
        vit_base_patch16_rope_reg1_gap_256 vit_betwixt_patch16_rope_reg4_gap_256 vit_medium_patch16_rope_reg1_gap_256
        vit_mediumd_patch16_rope_reg1_gap_256
        """,
    ),
    (
        _PE | {"global_pool": "map", "attn_pool_num_heads": 8},
        """
        vit_pe_core_base_patch16_224 vit_pe_core_gigantic_patch14_448 vit_pe_core_large_patch14_336
        vit_pe_core_small_patch16_384 vit_pe_core_tiny_patch16_384
        """,
    ),
    (
        _PE | {"global_pool": "avg", "use_post_transformer_norm": False, "ref_feat_shape": 32},
        """
        vit_pe_lang_large_patch14_448 vit_pe_spatial_base_patch16_512 vit_pe_spatial_large_patch14_448
        vit_pe_spatial_small_patch16_512 vit_pe_spatial_tiny_patch16_512
        """,
    ),
    (
        _PE | {"global_pool": "avg", "use_post_transformer_norm": False, "ref_feat_shape": 32, "rope_grid_offset": 0.0},
        """
        vit_pe_lang_gigantic_patch14_448 vit_pe_spatial_gigantic_patch14_448
        """,
    ),
    (
        {"final_norm": False, "no_embed_class": True},
        """
        vit_base_patch16_radio_v3 vit_giant_patch16_radio_v3 vit_huge_patch16_radio_v3 vit_huge_patch16_radio_v4
        vit_large_patch16_radio_v3 vit_so400m_patch16_radio_v4
        """,
    ),
    (
        {"final_norm": False},
        """
        vit_intern300m_patch14_448
        """,
    ),
)
ARGUMENTS: Mapping[str, Mapping[str, Any]] = {name: each for each, names in _ARGUMENTS for name in names.split()}
