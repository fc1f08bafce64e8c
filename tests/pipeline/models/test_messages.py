"""What models and their settings say when they refuse, each message once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pipeline.models import ModelConfig, ViT
from pipeline.models.conversion.convert import save_as
from pipeline.models.layers import LinearHead
from pipeline.models.masked import output_names
from pipeline.models.patches import resized_patches
from pipeline.models.positions import resample_position_embeddings
from pipeline.models.resnet import BiT
from pipeline.models.weights.folder import open_weights, refuse_no_classifier, save_weights
from tests.pipeline.models.test_build import tensor
from tests.pipeline.models.test_config import OWN
from tests.pipeline.models.test_masked import PARTS, PIXELS, VIT, vit, weights_of
from tests.pipeline.models.test_patches import random_weight
from tests.pipeline.models.test_positions import WIDTH
from tests.pipeline.models.test_positions import table as table_positions
from tests.pipeline.models.test_vit import TINY, random_images, random_model
from tests.rigs.messages import Row, row, table

TARGETS = (VIT, PARTS, PIXELS)


def initial_value_of(_: Path, name: str) -> None:
    tensor(name, 4, 4)


def transformer_of(folder: Path, name: str) -> None:
    _ = ModelConfig(name=name).size


def model(_: Path, fields: dict[str, Any]) -> None:
    ModelConfig(**fields)


def masked(_: Path, changes: dict[str, Any]) -> None:
    replace(VIT, **changes)


def exported_to_timm(folder: Path, config: ModelConfig) -> None:
    weights = weights_of(vit(config), config)
    save_as("timm", folder / "timm", config=config, labels=weights.labels, tensor=weights.tensor)


def classifying(folder: Path, config: ModelConfig) -> None:
    save_weights(folder, config=config, labels=output_names(config), tensor=weights_of(vit(config), config).tensor)
    refuse_no_classifier(open_weights(str(folder)))


def grid_without_patches(_: Path) -> None:
    resample_position_embeddings(table_positions((4, 4)), from_grid=(4, 4), to_grid=(0, 6))


def rows_of_a_table(_: Path, num: int) -> None:
    resample_position_embeddings(torch.zeros(num, WIDTH), from_grid=(4, 4), to_grid=(6, 6))


def smaller_images(_: Path) -> None:
    model = random_model(position="relative")
    model(random_images(size=8))


def images_of(_: Path, height: int, width: int) -> None:
    random_model()(torch.zeros(1, height, width, 3, dtype=torch.uint8))


@table(
    # build
    *(
        row(f"a parameter without a rule, {name}", initial_value_of, name).says(
            "ValueError: no initial value is defined for the parameter '…'"
        )
        for name in ("blocks.0.attention.rotary.weight", "scale")
    ),
    # config
    *(
        row(f"the size of the transformer of {name}", transformer_of, name).says(
            f"ValueError: {name} is a ResNet, it has no transformer"
        )
        for name in ("bit_r50x1", "bit_r50x2", "bit_r101x1", "bit_r152x1", "bit_r152x2", "bit_r152x4", "bit_r200x3")
    ),
    row("between", model, {"image_size": 225}).says(
        "model.image_size is 225, not a multiple of the patch (16 px); take 224 or 240, or another --model.patch"
    ),
    row("smaller than a patch", model, {"image_size": 8}).says(
        "model.image_size is 8, less than one patch (16 px); take 16 or a multiple of it, or another --model.patch"
    ),
    row("H/14 is fine-tuned at 518", model, {"name": "vit_h14", "image_size": 512}).says(
        "model.image_size is 512, not a multiple of the patch (14 px); take 504 or 518, or another --model.patch"
    ),
    row("uneven heads", model, {"width": 770}).says("model.width is 770, not a multiple of model.num_heads = 12"),
    row("unknown name", model, {"name": "vit_x"}).says(
        "model.name is 'vit_x', which is none of vit_b32, vit_b16, vit_l32, vit_l16, vit_h14, vit_ti16, vit_s16, "
        "vit_s32, vit_b8, vit_g14, vit_bigg14, vit_b32_half, r50_vit_b16, r50_vit_b32, r50_vit_l16, r50_vit_l32, "
        "r26_vit_s32, r_vit_ti1…_r34x1; a model of your own also needs --model.patch, --model.depth, "
        "--model.width, --model.mlp-width, --model.num-heads"
    ),
    row("one size is missing", model, OWN | {"num_heads": None}).says(
        "model.name is 'vit', which is none of vit_b32, vit_b16, vit_l32, vit_l16, vit_h14, vit_ti16, vit_s16, "
        "vit_s32, vit_b8, vit_g14, vit_bigg14, vit_b32_half, r50_vit_b16, r50_vit_b32, r50_vit_l16, r50_vit_l32, "
        "r26_vit_s32, r_vit_ti16, bit_r50x1, bit_r50x2, bit_r101x1, bit_r152x1, bit_r152x2, bit_r152x4, "
        "bit_r200x3, bit_r18x1, bit_r34x1; a model of your own also needs --model.num-heads"
    ),
    row("no layers", model, {"depth": 0}).says("model.depth is 0; allowed: 1 to 1,000, or none"),
    row("no patch: not a division by zero", model, {"patch": 0}).says(
        "model.patch is 0; allowed: 1 to 16,384, or none"
    ),
    row("negative", model, {"num_heads": -1}).says("model.num_heads is -1; allowed: 1 to 65,536, or none"),
    row("layers without end", model, {"depth": 10**9}).says("model.depth is 1000000000; allowed: 1 to 1,000, or none"),
    row("too wide", model, {"width": 2**40}).says("model.width is 1099511627776; allowed: 1 to 65,536, or none"),
    row("too wide inside", model, {"mlp_width": 2**62}).says(
        "model.mlp_width is 4611686018427387904; allowed: 1 to 1,048,576, or none"
    ),
    row("terabytes of pixels", model, {"image_size": 10**9}).says(
        "model.image_size is 1000000000; allowed: 1 to 16,384"
    ),
    row("a head of terabytes", model, {"num_classes": 10**9}).says(
        "model.num_classes is 1000000000; allowed: 0 (as many as the dataset has) to 10,000,000"
    ),
    row("stages", model, {"name": "bit_r50x1", "resnet_units": (1,) * 9}).says(
        "model.resnet_units is 1 1 1 1 1 1 1 1 1; allowed: the units of 1 to 8 stages, such as 3 4 6 3"
    ),
    row("units", model, {"name": "bit_r50x1", "resnet_units": (10**9,)}).says(
        "model.resnet_units.0 is 1000000000; allowed: 1 to 1,000"
    ),
    row("factor", model, {"name": "bit_r50x1", "resnet_factor": 10**6}).says(
        "model.resnet_factor is 1000000; allowed: 1 to 64, or none"
    ),
    row("negative classes", model, {"num_classes": -1}).says(
        "model.num_classes is -1; allowed: 0 (as many as the dataset has) to 10,000,000"
    ),
    row("drops everything", model, {"dropout": 1.0}).says("model.dropout is 1.0; allowed: 0 to below 1"),
    row("another pooling", model, {"pooling": "max"}).says(
        "model.pooling is 'max'; allowed: token, average, attention"
    ),
    row("another GELU", model, {"gelu": "erf"}).says("model.gelu is 'erf'; allowed: tanh, exact, quick"),
    row("no positions", model, {"position": "none", "position_at": "layers"}).says(
        "model.position_at is 'layers' with model.position 'none', which adds nothing to the input; leave it out, "
        "or give --model.position learned_1d or learned_2d"
    ),
    row("sines", model, {"position": "sincos2d", "position_at": "layers"}).says(
        "model.position_at is 'layers' with model.position 'sincos2d', which is added to the input alone; leave "
        "it out, or give --model.position learned_1d or learned_2d"
    ),
    row("a quarter of a width", model, OWN | {"width": 26, "num_heads": 2, "position": "sincos2d"}).says(
        "model.width is 26: sincos2d positions have sines and cosines of columns and rows, a quarter of it each, "
        "of at least two frequencies; give a --model.width that is a multiple of 4 from 8 on, or --model.position "
        "learned_1d"
    ),
    row("another position", model, {"position": "2d"}).says(
        "model.position is '2d'; allowed: none, learned_1d, learned_2d, relative, sincos2d, rope2d, learned_rope2d"
    ),
    row("axial", model, {"attention": "axial"}).says(
        "model.attention is 'axial' with model.pooling 'token', whose class token is in no row or column of "
        "patches; give --model.pooling average, or leave out --model.attention"
    ),
    row("a distillation token without a class token", model, {"distillation_token": True, "pooling": "average"}).says(
        "model.distillation_token is on with model.pooling 'average', which has no class token beside which it could "
        "be; give --model.pooling token, or --model.no-distillation-token"
    ),
    row("a distillation token and a hidden layer", model, {"distillation_token": True, "representation": True}).says(
        "model.representation is on with model.distillation_token, whose two heads read the tokens without a hidden "
        "layer (DeiT); give --model.no-representation"
    ),
    row(
        "a distillation token and masked patches",
        model,
        {"distillation_token": True, "masked_patches": True, "num_classes": 512},
    ).says(
        "model.distillation_token is on with model.masked_patches, whose head reads the patches; give "
        "--model.no-distillation-token"
    ),
    row("axial distances", model, {"attention": "axial", "pooling": "average", "position": "relative"}).says(
        "model.attention is 'axial' with model.position 'relative', which is of the sequence of all tokens, not "
        "of a row or column; give --model.position learned_1d, learned_2d, sincos2d or none"
    ),
    row("axial rotations", model, {"attention": "axial", "pooling": "average", "position": "rope2d"}).says(
        "model.attention is 'axial' with model.position 'rope2d', which is of the sequence of all tokens, not of "
        "a row or column; give --model.position learned_1d, learned_2d, sincos2d or none"
    ),
    row("axial registers", model, {"attention": "axial", "pooling": "average", "registers": 4}).says(
        "model.attention is 'axial' with model.registers 4, which are in no row or column of patches; give "
        "--model.registers 0, or leave out --model.attention"
    ),
    row("other attention", model, {"attention": "local"}).says("model.attention is 'local'; allowed: global, axial"),
    row("axial BiT", model, {"name": "bit_r18x1", "attention": "axial"}).says(
        "model.attention is 'axial'; bit_r18x1 is a ResNet and has no such part; leave it out"
    ),
    row("no epsilon", model, {"layer_norm_epsilon": 0.0}).says("model.layer_norm_epsilon is 0.0; allowed: above 0"),
    row("negative deviation", model, {"position_std": -0.1}).says("model.position_std is -0.1; allowed: 0 or more"),
    row("negative deviation of a head", model, {"head_std": -0.1}).says("model.head_std is -0.1; allowed: 0 or more"),
    row("half of an odd width", model, OWN | {"width": 27, "num_heads": 3, "position": "learned_2d"}).says(
        "model.width is 27: 2-D position embeddings take half of it for columns and half for rows; give an even "
        "--model.width, or --model.position learned_1d"
    ),
    row("a factor of nothing", model, {"resnet_factor": 2}).says(
        "model.resnet_factor is given without a ResNet; also give --model.resnet-units"
    ),
    row("an empty stage", model, {"name": "r50_vit_b16", "resnet_units": (3, 0)}).says(
        "model.resnet_units.1 is 0; allowed: 1 to 1,000"
    ),
    row("no stage", model, {"name": "bit_r50x1", "resnet_units": ()}).says(
        "model.resnet_units is none; allowed: the units of 1 to 8 stages, such as 3 4 6 3"
    ),
    row("no channels", model, {"name": "bit_r50x1", "resnet_factor": 0}).says(
        "model.resnet_factor is 0; allowed: 1 to 64, or none"
    ),
    row("hybrid", model, {"name": "r50_vit_b16", "image_size": 230}).says(
        "model.image_size is 230, not a multiple of the patch (16 px); take 224 or 240, or another --model.patch"
    ),
    row("BiT has no transformer", model, {"name": "bit_r50x1", "representation": True, "depth": 3}).says(
        "model.depth is 3, model.representation is True; bit_r50x1 is a ResNet and has no such part; leave it out"
    ),
    row("negative scale", model, {"layer_scale": -1e-4}).says("model.layer_scale is -0.0001; allowed: 0 (off) or more"),
    row("BiT, norms", model, {"name": "bit_r50x1", "qk_norm": True}).says(
        "model.qk_norm is True; bit_r50x1 is a ResNet and has no such part; leave it out"
    ),
    row(
        "pooling that nothing trains",
        model,
        {"pooling": "attention", "masked_patches": True, "num_classes": 512},
    ).says(
        "model.pooling is 'attention' with model.masked_patches, whose head reads the patches, so the pooling "
        "would learn nothing; give --model.pooling average or token"
    ),
    row("BiT, MAP", model, {"name": "bit_r50x1", "pooling": "attention"}).says(
        "model.pooling is 'attention'; bit_r50x1 is a ResNet and has no such part; leave it out"
    ),
    row("rotary", model, {"position": "rope2d", "position_at": "layers"}).says(
        "model.position_at is 'layers' with model.position 'rope2d', which adds nothing to the input; leave it "
        "out, or give --model.position learned_1d or learned_2d"
    ),
    row("channels of a head", model, OWN | {"width": 24, "position": "rope2d"}).says(
        "model.width is 24 with 4 heads: rope2d turns pairs of channels of a head, as many for columns as for "
        "rows, so a head needs a multiple of 4 channels, not 6; give another --model.width or --model.num-heads, "
        "or --model.position learned_1d"
    ),
    row("negative registers", model, {"registers": -1}).says("model.registers is -1; allowed: 0 (none) to 1,024"),
    row("relative", model, {"registers": 4, "position": "relative"}).says(
        "model.registers is 4 with model.position 'relative': registers have no position, so positions must be "
        "added to the input alone; give --model.registers 0, or --model.position learned_1d without "
        "--model.position-at"
    ),
    row("layers", model, {"registers": 4, "position_at": "layers"}).says(
        "model.registers is 4 with model.position_at 'layers': registers have no position, so positions must be "
        "added to the input alone; give --model.registers 0, or --model.position learned_1d without "
        "--model.position-at"
    ),
    row("BiT, four", model, {"name": "bit_r50x1", "registers": 4}).says(
        "model.registers is 4; bit_r50x1 is a ResNet and has no such part; leave it out"
    ),
    row("BiT, scale", model, {"name": "bit_r50x1", "layer_scale": 1e-4}).says(
        "model.layer_scale is 0.0001; bit_r50x1 is a ResNet and has no such part; leave it out"
    ),
    row("no pixels", model, {"name": "bit_r50x1", "image_size": 0}).says("model.image_size is 0; allowed: 1 to 16,384"),
    # masked
    row(
        "masked: num_classes: 10",
        masked,
        {"num_classes": 10},
    ).says(
        "model.num_classes is 10 with model.masked_patches, which predicts 512 mean colours; give "
        "--model.num-classes 512, or --model.no-masked-patches"
    ),
    row(
        "masked: representation: True",
        masked,
        {"representation": True},
    ).says(
        "model.representation is on with model.masked_patches, whose head reads the patches, without a hidden "
        "layer; give --model.no-representation"
    ),
    row(
        "masked: masked_target: parts",
        masked,
        {"masked_target": "parts"},
    ).says(
        "model.num_classes is 512 with model.masked_patches, which predicts 512 colours for each of 16 parts of a "
        "patch; give --model.num-classes 8192, or --model.no-masked-patches"
    ),
    row(
        "masked: masked_target: pixels",
        masked,
        {"masked_target": "pixels"},
    ).says(
        "model.num_classes is 512 with model.masked_patches, which predicts 3 values for each of the 4 x 4 pixels "
        "of a patch; give --model.num-classes 48, or --model.no-masked-patches"
    ),
    row(
        "masked: masked_target: parts, num_classes: 8192, patch: 2",
        masked,
        {"masked_target": "parts", "num_classes": 8192, "patch": 2},
    ).says(
        "model.masked_target is 'parts' with patches of 2 px, which are cut into 4 x 4 parts; give a "
        "--model.patch whose pixels are a multiple of 4, or --model.masked-target mean or pixels"
    ),
    row(
        "masked: masked_share: 1.0",
        masked,
        {"masked_share": 1.0},
    ).says("model.masked_share is 1.0; allowed: above 0 to below 1"),
    row(
        "masked: masked_patches: False, masked_share: 0.15",
        masked,
        {"masked_patches": False, "masked_share": 0.15},
    ).says(
        "model.masked_target is 'mean' and model.masked_share 0.15 without model.masked_patches, which alone uses "
        "them; give --model.masked-patches, or leave them out"
    ),
    row(
        "masked: masked_patches: False, masked_target: pixels",
        masked,
        {"masked_patches": False, "masked_target": "pixels"},
    ).says(
        "model.masked_target is 'pixels' and model.masked_share 0.5 without model.masked_patches, which alone "
        "uses them; give --model.masked-patches, or leave them out"
    ),
    row("rates of nothing", lambda _: ModelConfig(name="vit_b16", stochastic_depth_rates="uniform")).says(
        "model.stochastic_depth_rates is 'uniform' with model.stochastic_depth 0, with which no block leaves out "
        "anything; give --model.stochastic-depth above 0, or --model.stochastic-depth-rates rising"
    ),
    row(
        "a ResNet, which has no patches to mask",
        lambda _: ModelConfig(name="bit_r50x1", masked_patches=True, num_classes=512),
    ).says("model.masked_patches is True; bit_r50x1 is a ResNet and has no such part; leave it out"),
    *(
        row(f"exporting a model that predicts {config.masked_target}", exported_to_timm, config).says(
            "the weights predict the colours of masked patches: other libraries have no such head; give --new-head "
            "--num-classes K for a classifier of zeros"
        )
        for config in TARGETS
    ),
    *(
        row(f"classifying with a model that predicts {config.masked_target}", classifying, config).says(
            "the weights at 'DIR' predict the colours of masked patches and classify no images; fine-tune them first "
            "(patchline finetune), or measure them with patchline fewshot"
        )
        for config in TARGETS
    ),
    # positions
    row("a grid without patches", grid_without_patches).says(
        "ValueError: 17 position embeddings do not fit 1 + 4 x 4, or cannot be made 0 x 6"
    ),
    *(
        row(f"rows of a position table, {num}", rows_of_a_table, num).says(
            "ValueError: 1… position embeddings do not fit 1 + 4 x 4, or cannot be made 6 x 6"
        )
        for num in (16, 18, 197)
    ),
    row("relative positions of another image size", smaller_images).says(
        "ValueError: 5 tokens; relative positions are of 10: give images of one size"
    ),
    # patches
    row("patches of another layout", lambda _: resized_patches(random_weight(4), from_side=5, to_side=4)).says(
        "ValueError: a patch embedding of [5, 48] is not of patches of 5 x 5 px"
    ),
    # resnet
    row("a BiT that is a ViT", lambda _: BiT(ModelConfig(name="vit_b16"))).says(
        "ValueError: vit_b16 is none of BiT's ResNets"
    ),
    # vit
    row("images of 12 x 13", images_of, 12, 13).says(
        "ValueError: images of 12 x 13 px do not fit patches of 4 px; give multiples of them"
    ),
    row("images of 13 x 12", images_of, 13, 12).says(
        "ValueError: images of 13 x 12 px do not fit patches of 4 px; give multiples of them"
    ),
    row("images of 0 x 12", images_of, 0, 12).says(
        "ValueError: images of 0 x 12 px do not fit patches of 4 px; give multiples of them"
    ),
    row("images of 2 x 12", images_of, 2, 12).says(
        "ValueError: images of 2 x 12 px do not fit patches of 4 px; give multiples of them"
    ),
    row("a model without classes", lambda _: ViT(ModelConfig(**(TINY | {"num_classes": 0})))).says(
        "ValueError: num_classes is 0: take it from the dataset before the model is built"
    ),
    row("a head without classes", lambda _: LinearHead(8, 0, constant=0.0)).says(
        "ValueError: num_classes is 0: take it from the dataset before the model is built"
    ),
)
def test_messages(refusal: Row, tmp_path: Path) -> None:
    refusal.check(tmp_path)
