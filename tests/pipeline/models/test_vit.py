"""The model against the paper: equations 1 to 4 in plain NumPy, and the options that change them.

Pixels are in the value range of the paper's code, and the classifier is fp32 in any model.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from scipy.special import erf

from pipeline.models import ModelConfig, ViT, build_model, shapes_of
from pipeline.models.layers import LinearHead, centred, gelu_by_sigmoid
from pipeline.models.positions import resample_position_embeddings, rotated, rotations

Array = NDArray[np.float64]
TINY: dict[str, Any] = {"name": "vit", "image_size": 12, "num_classes": 5, "patch": 4, "depth": 2, "width": 24}
EVERY_BYTE = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16, 1).expand(-1, -1, -1, 3)
TINY |= {"mlp_width": 40, "num_heads": 3}
AXIAL: dict[str, Any] = {"attention": "axial", "pooling": "average"}
RMS: dict[str, Any] = {"norm": "rmsnorm", "layer_norm_epsilon": 1e-2}  # an epsilon that changes the logits
EVA02: dict[str, Any] = {"position": "learned_rope2d", "rotary_temperature": 10_000.0}


def random_model(*, seed: int = 0, **fields: Any) -> ViT:
    """A tiny model in which no tensor is zero or one, including the head."""
    model = ViT(ModelConfig(**(TINY | fields)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def random_images(num: int = 3, size: int = 12) -> torch.Tensor:
    return torch.randint(0, 256, (num, size, size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def layer_norm(p: dict[str, Array], name: str, x: Array) -> Array:
    """A LayerNorm or, without a bias, an RMSNorm."""
    bias = p.get(f"{name}.bias")
    centred: Array = x if bias is None else x - x.mean(-1, keepdims=True)
    normal: Array = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + p["epsilon"])
    scaled: Array = normal * p[f"{name}.weight"]
    return scaled if bias is None else scaled + bias


def sigmoid(x: Array) -> Array:
    result: Array = 1 / (1 + np.exp(-x))
    return result


def hidden_of(x: Array, config: ModelConfig) -> Array:
    """What an MLP's last layer multiplies, before its norm: SwiGLU or the GELU of x."""
    if config.mlp == "plain":
        return gelu(x, exact=config.gelu == "exact") if config.gelu != "quick" else x * sigmoid(1.702 * x)
    gate, value = np.split(x, 2, axis=-1)
    result: Array = gate * sigmoid(gate) * value
    return result


def gelu(x: Array, *, exact: bool) -> Array:
    if exact:
        smooth: Array = 0.5 * x * (1 + erf(x / np.sqrt(2)))
        return smooth
    inner: Array = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    result: Array = 0.5 * x * (1 + np.tanh(inner))
    return result


def reference_logits(model: ViT, images: NDArray[np.uint8]) -> Array:
    """Equations 1 to 4 in float64, one image, one patch and one head at a time."""
    p = {name: tensor.detach().double().numpy() for name, tensor in model.state_dict().items()}
    p["epsilon"] = np.array(model.config.layer_norm_epsilon)
    size = model.config.size
    logits = []
    for image in images:
        tokens = [p[name][0, 0] for name in ("embed.class_token", "embed.distillation_token") if name in p]
        for top in range(0, image.shape[0], size.patch):
            for left in range(0, image.shape[1], size.patch):
                patch = image[top : top + size.patch, left : left + size.patch].astype(np.float64)
                flat = ((patch - 127.5) / 127.5).reshape(-1)  # rows, columns, colours
                token = p["embed.patch.weight"] @ flat + p["embed.patch.bias"]
                tokens.append(layer_norm(p, "embed.patch_norm", token) if model.config.patch_norm else token)
        z = np.stack(tokens) + reference_positions(model, p)  # equation 1
        first, num_prefix = model.config.num_class_tokens, model.config.num_prefix_tokens
        if model.config.registers:
            z = np.concatenate([z[:first], p["embed.registers"][0], z[first:]])
        if model.config.first_norm:
            z = layer_norm(p, "embed.norm", z)
        turns = turns_of(model.config)
        for number in range(model.config.num_blocks):
            if number and model.config.position_at != "input":
                prefix = "embed" if model.config.position_at == "layers_shared" else f"blocks.{number}.positions"
                z = z + reference_positions(model, p, prefix)
            scales = [p.get(f"blocks.{number}.scale{branch}.gamma", np.array(1.0)) for branch in (1, 2)]
            for line in lines_of(model, number, len(z)):  # equation 2
                added = attention(p, f"blocks.{number}", z[line], num_heads=size.num_heads, turns=turns)
                z[line] = z[line] + scales[0] * added
            normed = layer_norm(p, f"blocks.{number}.norm2", z)
            mlp = f"blocks.{number}.mlp.dense"
            hidden = hidden_of(normed @ p[f"{mlp}1.weight"].T + p[f"{mlp}1.bias"], model.config)
            if model.config.inner_norms != "none":
                hidden = layer_norm(p, f"blocks.{number}.mlp.norm", hidden)
            z = z + scales[1] * (hidden @ p[f"{mlp}2.weight"].T + p[f"{mlp}2.bias"])  # equation 3
        pooled = layer_norm(p, "norm", z) if model.config.last_norm == "tokens" else z
        y = pooled[0] if model.config.pooling == "token" else pooled[num_prefix:].mean(0)  # equation 4
        if model.config.last_norm == "pooled":
            y = layer_norm(p, "norm", y)
        if model.config.pooling == "attention":
            y = map_head(p, pooled[num_prefix:], model.config)
        if model.config.representation:
            y = np.tanh(p["representation.weight"] @ y + p["representation.bias"])
        read = {"head": y} | ({"head_dist": pooled[1]} if model.config.distillation_token else {})
        of_heads = [p[f"{head}.weight"] @ x + p[f"{head}.bias"] + model.config.head_bias for head, x in read.items()]
        logits.append(np.mean(of_heads, axis=0))  # DeiT: the mean of both heads
    return np.stack(logits)


def map_head(p: dict[str, Array], x: Array, config: ModelConfig) -> Array:
    """big_vision's MAPHead, one head at a time: x is the probe's attention, then x + MLP(LayerNorm(x))."""
    width, num_heads = config.size.width, config.size.num_heads
    q = p["pool.query.weight"] @ p["pool.probe"][0, 0] + p["pool.query.bias"]
    weights, biases = p["pool.key_value.weight"].reshape(2, width, width), p["pool.key_value.bias"].reshape(2, width)
    k, v = (x @ weights[i].T + biases[i] for i in range(2))
    heads = []
    for own in np.split(np.arange(width), num_heads):
        scores = k[:, own] @ q[own] / np.sqrt(width // num_heads)
        shares = np.exp(scores - scores.max())
        heads.append(shares / shares.sum() @ v[:, own])
    y = p["pool.out.weight"] @ np.concatenate(heads) + p["pool.out.bias"]
    normed = layer_norm(p, "pool.norm", y)
    hidden = gelu(p["pool.mlp.dense1.weight"] @ normed + p["pool.mlp.dense1.bias"], exact=config.gelu == "exact")
    result: Array = y + p["pool.mlp.dense2.weight"] @ hidden + p["pool.mlp.dense2.bias"]
    return result


def lines_of(model: ViT, number: int, num_tokens: int) -> list[list[int]]:
    """The tokens that a block's attention mixes: all, or those of each row, then of each column (appendix D.6)."""
    if model.config.attention == "global":
        return [list(range(num_tokens))]
    height, width = model.config.grid
    rows = [[row * width + column for column in range(width)] for row in range(height)]
    return rows if number % 2 == 0 else [list(column) for column in zip(*rows, strict=True)]


def reference_positions(model: ViT, p: dict[str, Array], at: str = "embed") -> Array:
    if model.config.has_table:
        table: Array = p[f"{at}.position"][0]
        return table
    places = [np.zeros(model.config.size.width)] * model.config.num_class_tokens
    if model.config.position == "sincos2d":
        rows, columns = map(range, model.config.grid)
        return np.stack([*places, *reference_sines(rows, columns, model.config.size.width)])
    for row in range(model.config.grid[0]):
        for column in range(model.config.grid[1]):
            is_none = model.config.position in ("none", "relative", "rope2d")
            both = [] if is_none else [p[f"{at}.position_x"][column], p[f"{at}.position_y"][row]]
            places.append(np.zeros(model.config.size.width) if is_none else np.concatenate(both))
    return np.stack(places)


def reference_sines(rows: Sequence[float], columns: Sequence[float], d: int) -> Array:
    """The rows at these places one after another; each patch: sine and cosine of its column, sine and cosine of its
    row."""
    frequencies = 10_000.0 ** (-np.arange(d // 4) / (d // 4 - 1))
    return np.stack(
        [
            np.concatenate([wave(place * frequencies) for place in (column, row) for wave in (np.sin, np.cos)])
            for row in rows
            for column in columns
        ]
    )


def turns_of(config: ModelConfig) -> Array | None:
    """The complex number by which each pair of a head's channels is multiplied: [N, d / 2]."""
    if not config.is_rotary:
        return None
    num = config.size.width // config.size.num_heads // 4
    frequencies = config.rotary_temperature ** (-np.arange(num) / num)
    side = config.grid[0]
    stretch = config.rotary_grid / side if config.rotary_grid else 1.0
    places: dict[str, Callable[[int], float]] = {
        "from_zero": lambda i: i * stretch,
        "from_one": lambda i: (i + 1) * stretch,
        "centred": lambda i: 2 * np.pi * (-1 + (2 * i + 1) / side),
    }
    place = places[config.rotary_places]
    angles = [np.zeros(2 * num)] * config.num_prefix_tokens
    rows, columns = config.grid
    angles += [
        np.concatenate([place(x) * frequencies, place(y) * frequencies]) for y in range(rows) for x in range(columns)
    ]
    turns: Array = np.exp(1j * np.stack(angles))
    return turns


def turned(x: Array, turns: Array) -> Array:
    pairs = (x[:, ::2] + 1j * x[:, 1::2]) * turns
    result: Array = np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)
    return result


def attention(p: dict[str, Array], block: str, z: Array, *, num_heads: int, turns: Array | None) -> Array:
    normed = layer_norm(p, f"{block}.norm1", z)
    width = normed.shape[1]
    weights = p[f"{block}.attention.qkv.weight"].reshape(3, width, width)
    biases = p[f"{block}.attention.qkv.bias"].reshape(3, width)
    q, k, v = (normed @ weights[i].T + biases[i] for i in range(3))
    side, heads = width // num_heads, []
    for head in range(num_heads):
        own = slice(head * side, (head + 1) * side)
        if f"{block}.attention.q_norm.weight" in p:
            q[:, own] = layer_norm(p, f"{block}.attention.q_norm", q[:, own])
            k[:, own] = layer_norm(p, f"{block}.attention.k_norm", k[:, own])
        if turns is not None:
            q[:, own], k[:, own] = turned(q[:, own], turns), turned(k[:, own], turns)
        scores = q[:, own] @ k[:, own].T
        if (relative := p.get(f"{block}.attention.relative.relative")) is not None:
            for i, j in np.ndindex(scores.shape):  # the embedding of the distance i - j is another key
                scores[i, j] += q[i, own] @ relative[i - j + len(z) - 1, own]
        scores /= np.sqrt(side)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(shares / shares.sum(-1, keepdims=True) @ v[:, own])
    joined = np.concatenate(heads, axis=1)
    if f"{block}.attention.norm.weight" in p:
        joined = layer_norm(p, f"{block}.attention.norm", joined)
    result: Array = joined @ p[f"{block}.attention.out.weight"].T
    return result + p[f"{block}.attention.out.bias"]


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="a linear head"),
        pytest.param({"representation": True}, id="a hidden tanh layer before the head"),
        pytest.param({"head_bias": -10.0}, id="the constant of the multi-label head"),
        pytest.param({"patch": 6, "num_heads": 1, "depth": 1}, id="one head"),
        pytest.param({"image_size": 4}, id="a single patch"),
        pytest.param({"gelu": "exact"}, id="GELU without approximation"),
        pytest.param({"pooling": "average"}, id="the mean of all tokens, no class token"),
        pytest.param({"pooling": "average", "representation": True}, id="the mean, and a hidden layer"),
        pytest.param({"position": "none"}, id="no position embeddings"),
        pytest.param({"position": "learned_2d"}, id="2-D position embeddings"),
        pytest.param({"position": "learned_2d", "pooling": "average"}, id="2-D, no class token"),
        pytest.param({"position": "sincos2d"}, id="sines of columns and rows"),
        pytest.param({"position": "sincos2d", "pooling": "average", "representation": True}, id="as the plain ViT"),
        pytest.param({"position": "relative"}, id="relative positions"),
        pytest.param({"position": "relative", "pooling": "average", "num_heads": 1}, id="relative, no class token"),
        pytest.param({"position_at": "layers"}, id="1-D, each layer its own"),
        pytest.param({"position_at": "layers_shared", "depth": 3}, id="1-D, the same at each layer"),
        pytest.param({"position_at": "layers", "position": "learned_2d", "depth": 3}, id="2-D, each layer its own"),
        pytest.param({"position_at": "layers_shared", "position": "learned_2d"}, id="2-D, the same at each layer"),
        pytest.param({"layer_scale": 0.1}, id="LayerScale"),
        pytest.param({"registers": 3}, id="registers"),
        pytest.param({"distillation_token": True}, id="a distillation token"),
        pytest.param(
            {"distillation_token": True, "registers": 2, "position": "learned_2d", "head_bias": -10.0},
            id="a distillation token, registers, 2-D positions",
        ),
        pytest.param({"distillation_token": True, "position": "rope2d"}, id="a distillation token, rotary positions"),
        pytest.param({"distillation_token": True, "position": "relative"}, id="a distillation token, relative"),
        pytest.param({"position": "rope2d"}, id="rotary positions"),
        pytest.param(
            {"position": "rope2d", "registers": 2, "qk_norm": True, "layer_scale": 0.1, "pooling": "attention"},
            id="all that goes together",
        ),
        pytest.param({"pooling": "attention"}, id="attention pooling"),
        pytest.param({"gelu": "quick", "first_norm": True}, id="CLIP"),
        pytest.param({"mlp": "swiglu", "inner_norms": "mlp"}, id="SwiGLU with a norm"),
        pytest.param({"inner_norms": "both", "last_norm": "none"}, id="norms inside, none at the end"),
        pytest.param({"pooling": "average", "last_norm": "pooled", "registers": 2}, id="norm of the mean"),
        pytest.param({"pooling": "average", "last_norm": "none"}, id="the mean without a norm"),
        pytest.param(EVA02 | {"rotary_grid": 2, "mlp": "swiglu"}, id="EVA-02's positions"),
        pytest.param(EVA02 | {"rotary_grid": 2, "rotary_places": "from_one"}, id="Perception Encoder's"),
        pytest.param({"position": "rope2d", "rotary_places": "centred", "registers": 1}, id="DINOv3's positions"),
        pytest.param({"mlp": "swiglu", "inner_norms": "both", "pooling": "attention"}, id="MAP has a plain MLP"),
        pytest.param(
            {"pooling": "attention", "registers": 2, "representation": True, "gelu": "exact"},
            id="attention pooling of patches alone",
        ),
        pytest.param({"patch_norm": True}, id="a norm of patches, not of the class token"),
        pytest.param(RMS | {"patch_norm": True, "mlp": "swiglu", "pooling": "average"}, id="AIMv2"),
        pytest.param(
            RMS | {"qk_norm": True, "inner_norms": "both", "first_norm": True, "pooling": "attention"},
            id="RMSNorms in all places",
        ),
        pytest.param({"qk_norm": True}, id="norms of queries and keys"),
        pytest.param({"qk_norm": True, "position": "relative"}, id="norms of queries and keys, relative positions"),
        pytest.param({"registers": 2, "pooling": "average", "position": "sincos2d"}, id="registers, the mean"),
        pytest.param(AXIAL, id="axial attention"),
        pytest.param(AXIAL | {"position": "learned_2d", "representation": True}, id="axial, 2-D, a hidden layer"),
        pytest.param(AXIAL | {"position_at": "layers", "depth": 1}, id="axial, each block its own positions"),
        pytest.param(AXIAL | {"position_at": "layers_shared"}, id="axial, the same positions at each block"),
    ],
)
def test_logits_are_the_papers_equations(fields: dict[str, Any]) -> None:
    model = random_model(**fields)
    images = random_images(size=model.config.image_size)
    with torch.no_grad():
        found = model(images)
    expected = reference_logits(model, images.numpy())
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert np.ptp(expected) > 0.1, "logits that hardly differ would prove nothing"


@pytest.mark.parametrize(("size", "patch", "num_patches"), [(224, 16, 196), (48, 16, 9), (56, 14, 16)])
def test_an_image_is_hw_over_pp_patches_and_one_class_token_is_of_all_images(
    size: int, patch: int, num_patches: int
) -> None:
    """Channels divide nothing, and the token is no parameter for each image of a batch, as often written."""
    model = random_model(image_size=size, patch=patch)
    for batch in (1, 3):
        with torch.no_grad():
            z_BND = model.tokens(random_images(size=size)[:1].expand(batch, -1, -1, -1))
        assert z_BND.shape[:2] == (batch, num_patches + 1)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    width = model.config.size.width
    assert shapes["embed.class_token"] == (1, 1, width)
    assert shapes["embed.position"] == (1, num_patches + 1, width)
    assert shapes["embed.patch.weight"] == (width, patch * patch * 3)


@pytest.mark.parametrize("epsilon", [1e-6, 1e-12])
def test_layer_norms_epsilon_is_flaxs_or_the_one_asked_for(epsilon: float) -> None:
    """Features as small as epsilon show the difference between 1e-6 and PyTorch's 1e-5."""
    model, images = random_model(depth=1, layer_norm_epsilon=epsilon), random_images()
    with torch.no_grad():
        for parameter in (*model.embed.parameters(), *model.blocks.parameters()):
            parameter.mul_(1e-3)
        found = model(images)
    np.testing.assert_allclose(found.numpy(), reference_logits(model, images.numpy()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("representation", [False, True])
def test_the_head_is_fp32_in_a_bf16_model(representation: bool) -> None:
    model = random_model(representation=representation, head_bias=-10.0).to(torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        features, logits = model.features(random_images()), model(random_images())
    assert features.dtype == torch.bfloat16
    assert logits.dtype == torch.float32
    expected = F.linear(features.float(), model.head.weight.float(), model.head.bias.float()) - 10.0
    assert torch.equal(logits, expected)
    assert not torch.equal(logits, logits.bfloat16().float()), "finer than bf16 can tell"


def test_each_head_reads_its_own_token() -> None:
    """The second token of DistilledVisionTransformer in DeiT's models.py, which has a head and a position, too."""
    model, images = random_model(distillation_token=True, image_size=16), random_images(size=16)
    assert model.embed.position is not None
    assert model.embed.position.shape[1] == 2 + 16
    with torch.no_grad():
        both_BTD = model.norm(model.tokens(images)[:, :2])
        apart = model(images, heads_apart=True)
        assert torch.equal(apart[:, 0], model.head(both_BTD[:, 0]))
        assert model.head_dist is not None
        assert torch.equal(apart[:, 1], model.head_dist(both_BTD[:, 1]))
        assert torch.equal(model(images), (apart[:, 0] + apart[:, 1]) / 2)
        assert torch.equal(model.features(images), (both_BTD[:, 0] + both_BTD[:, 1]) / 2)
        larger = model(random_images(size=24), heads_apart=True)
    assert larger.shape == (3, 2, 5), "resampled positions keep two rows"
    new = build_model(ModelConfig(**TINY, distillation_token=True))
    assert isinstance(new, ViT)
    assert new.embed.distillation_token is not None
    assert float(new.embed.distillation_token.detach().std()) == pytest.approx(0.02, rel=0.5), "as in DeiT"


@pytest.mark.parametrize("constant", [0.0, -10.0, -6.9])
def test_a_new_model_says_its_constant_for_every_class(constant: float) -> None:
    model = build_model(ModelConfig(**TINY, head_bias=constant))
    assert torch.equal(model(random_images()), torch.full((3, 5), constant))


def test_a_zero_head_gives_no_gradient_to_the_rest_and_a_random_one_to_all() -> None:
    random = [random_model(), random_model(position="relative"), random_model(position_at="layers")]
    random += [
        random_model(layer_scale=0.1, registers=2, qk_norm=True),
        random_model(pooling="attention", position="rope2d"),
        random_model(distillation_token=True),
        random_model(**AXIAL),
    ]
    for model, everything in ((build_model(ModelConfig(**TINY)), False), *((one, True) for one in random)):
        torch.autograd.backward(F.cross_entropy(model(random_images()), torch.tensor([0, 1, 2])))
        moved = {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.abs().sum() > 0)}
        assert moved == (set(shapes_of(model.config)) if everything else {"head.weight", "head.bias"})


def test_dropout_acts_in_training_only() -> None:
    plain, dropping = random_model(), random_model(dropout=0.5)
    images = random_images()
    assert torch.equal(dropping(images), plain(images))
    torch.manual_seed(0)
    assert not torch.equal(dropping.train()(images), plain(images))


def test_numbers_from_0_to_255_may_be_floats() -> None:
    model, images = random_model(), random_images()
    assert torch.equal(model(images.float()), model(images))


def test_turns_of_another_grid_depend_on_distances_alone() -> None:
    config = ModelConfig(**(TINY | {"position": "rope2d", "registers": 1}))
    turns_2Nd = rotations(config, (3, 5))
    assert turns_2Nd.shape == (2, 17, 8)
    assert torch.equal(turns_2Nd[:, :2], torch.tensor([1.0, 0.0])[:, None, None].expand(-1, 2, 8)), "prefix tokens stay"
    q, k = (torch.randn(1, 1, 1, 8).expand(1, 17, 1, 8) for _ in range(2))
    products = rotated(q, turns_2Nd)[0, 2:, 0] @ rotated(k, turns_2Nd)[0, 2:, 0].T
    grid = products.reshape(3, 5, 3, 5)
    torch.testing.assert_close(grid[0, 0, 1, 2], grid[1, 2, 2, 4])
    torch.testing.assert_close(grid[2, 3, 0, 1], grid[2, 4, 0, 2])
    assert not torch.allclose(grid[0, 0, 1, 2], grid[0, 0, 2, 1])
    model = random_model(position="rope2d")
    assert model(torch.randint(0, 256, (2, 8, 20, 3), dtype=torch.uint8)).shape == (2, 5)


@pytest.mark.parametrize("pooling", ["token", "average"])
def test_images_of_another_grid_get_the_papers_resampled_positions(pooling: str) -> None:
    """Built for 3 x 3 patches, given 2 x 4."""
    model, other = random_model(pooling=pooling), random_model(pooling=pooling)
    images = torch.randint(0, 256, (2, 8, 16, 3), dtype=torch.uint8)
    assert model.embed.position is not None
    prefix = model.config.num_prefix_tokens
    table = resample_position_embeddings(
        model.embed.position[0], from_grid=(3, 3), to_grid=(2, 4), num_prefix_tokens=prefix
    )
    other.embed.position, other.embed.grid = torch.nn.Parameter(table[None]), (2, 4)
    assert torch.equal(model(images), other(images))


def test_2d_positions_of_another_grid_are_resampled_along_each_axis() -> None:
    model = random_model(position="learned_2d")
    positions_1ND = model.embed.positions((3, 5))
    assert positions_1ND is not None
    assert model.embed.position_x is not None
    grid_HWD = positions_1ND[0, 1:].reshape(3, 5, 24)
    assert not positions_1ND[0, 0].any(), "the class token has no place"
    torch.testing.assert_close(grid_HWD[0, ::2, :12], model.embed.position_x)
    torch.testing.assert_close(grid_HWD[0, 1, :12], model.embed.position_x[:2].mean(0))
    torch.testing.assert_close(grid_HWD[:, 0, 12:], model.embed.position_y)


@pytest.mark.parametrize(
    ("rotary", "places"),
    [
        pytest.param({}, (0, 1.5), id="counted from 0 in the model's grid of 3"),
        pytest.param({"rotary_places": "from_one"}, (1.5, 3), id="counted from 1 in the model's grid of 3"),
        pytest.param({"rotary_grid": 16}, (0, 8), id="a grid that is given"),
        pytest.param({"rotary_places": "centred"}, (-np.pi, np.pi), id="an axis of fixed length"),
    ],
)
def test_turns_of_another_grid_are_stretched_onto_the_models_own(
    rotary: dict[str, Any], places: tuple[float, float]
) -> None:
    config = ModelConfig(**(TINY | rotary | {"position": "rope2d", "pooling": "average"}))
    angles = np.array([[x, x / 10, y, y / 10] for y in places for x in places]).repeat(2, axis=1)
    turns_2Nd = rotations(config, (2, 2)).double()
    torch.testing.assert_close(turns_2Nd, torch.from_numpy(np.stack([np.cos(angles), np.sin(angles)])))
    in_2_pixels = ModelConfig(**vars(config) | {"patch": 2})
    assert torch.equal(rotations(config, (6, 6), patch=2), rotations(in_2_pixels, (6, 6)))


@pytest.mark.parametrize(
    ("grid", "rows", "columns"),
    [
        pytest.param((3, 3), (0, 1, 2), (0, 1, 2), id="the model's own"),
        pytest.param((2, 2), (0, 2), (0, 2), id="smaller"),
        pytest.param((1, 5), (0,), (0, 0.5, 1, 1.5, 2), id="one row; more columns"),
    ],
)
def test_sines_of_another_grid_are_stretched_onto_the_models_own(
    grid: tuple[int, int], rows: Sequence[float], columns: Sequence[float]
) -> None:
    """Corners fall on corners, as if a learned table were resampled."""
    positions_1ND = random_model(position="sincos2d", pooling="average").embed.positions(grid)
    assert positions_1ND is not None
    expected = torch.from_numpy(reference_sines(rows, columns, 24))
    torch.testing.assert_close(positions_1ND[0].double(), expected, rtol=0, atol=1e-6)


def test_sines_are_no_parameters_and_survive_a_model_that_is_built_without_memory() -> None:
    """As training builds it: on the meta device, then filled."""
    model, images = random_model(position="sincos2d"), random_images()
    assert set(shapes_of(model.config)) == set(shapes_of(ModelConfig(**TINY))) - {"embed.position"}
    with torch.device("meta"):
        other = ViT(model.config)
    other.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert torch.equal(other.eval()(images), model(images))


@pytest.mark.parametrize(
    "fields",
    [{"position": name} for name in ("none", "learned_1d", "learned_2d", "sincos2d", "rope2d")],
)
def test_what_positions_tell(fields: dict[str, Any]) -> None:
    """Without positions the patches are a set: any order of them gives the same logits."""
    model, images = random_model(**fields), random_images()
    shuffled = images.roll(shifts=4, dims=1)  # by one patch
    assert torch.allclose(model(images), model(shuffled), atol=1e-5) == (fields["position"] == "none")


def test_a_hybrid_takes_images_of_any_whole_grid() -> None:
    model = random_model(name="r50_vit_b16", image_size=32, patch=2, resnet_units=(1, 1))
    assert model.config.stride == 16
    images = torch.randint(0, 256, (2, 16, 48, 3), dtype=torch.uint8)
    assert model(images).shape == (2, 5)
    assert model.embed(images)[0].shape == (2, 1 + 1 * 3, 24)


def test_gelu_by_sigmoid_is_the_tanh_approximation() -> None:
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64).requires_grad_()
    expected = F.gelu(x, approximate="tanh")
    torch.testing.assert_close(gelu_by_sigmoid(x), expected, rtol=1e-11, atol=1e-14)
    ours, theirs = (torch.autograd.grad(y.sum(), x)[0] for y in (gelu_by_sigmoid(x), expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_gelu_by_sigmoid_rounds_once_in_bf16() -> None:
    x = torch.linspace(-6, 6, 1001, dtype=torch.bfloat16)
    exact = F.gelu(x.double(), approximate="tanh").to(torch.bfloat16)
    assert gelu_by_sigmoid(x).dtype == torch.bfloat16
    differs = (gelu_by_sigmoid(x) - exact).abs() > exact.abs() / 128 + 1e-7
    assert not differs.any()


def test_black_is_minus_one_and_white_is_one() -> None:
    images = torch.tensor([0, 255, 51], dtype=torch.uint8).reshape(1, 1, 3, 1).expand(-1, -1, -1, 3)
    expected = torch.tensor([-1.0, 1.0, -0.6]).reshape(1, 1, 3, 1).expand(-1, -1, -1, 3)
    torch.testing.assert_close(centred(images, torch.float32), expected)


def test_bytes_and_the_same_numbers_as_floats_are_one() -> None:
    assert torch.equal(centred(EVERY_BYTE, torch.float32), centred(EVERY_BYTE.float(), torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_computed_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    found = centred(EVERY_BYTE, dtype)
    assert found.dtype == dtype
    assert torch.equal(found, ((EVERY_BYTE.float() - 127.5) / 127.5).to(dtype))


def test_product_bias_and_constant_are_fp32_in_a_bf16_model() -> None:
    head = LinearHead(8, 5, constant=-10.0).to(torch.bfloat16)
    features = torch.randn(3, 8).bfloat16()
    expected = F.linear(features.float(), head.weight.float(), head.bias.float()) - 10.0
    assert torch.equal(head(features), expected)
    assert expected.dtype == torch.float32
