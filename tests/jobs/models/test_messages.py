"""What evaluation and export say when they refuse, each message once."""

from pathlib import Path

from jobs.models.evaluate import EvaluateJob
from jobs.models.evaluate import run as run_evaluate
from jobs.models.export_weights import ExportJob
from jobs.models.export_weights import run as run_export_weights
from pipeline.evaluation.config import EvaluatedData
from pipeline.models import build_model
from pipeline.models.weights.folder import save_weights
from tests.jobs.models.test_export_weights import CONFIG, LABELS
from tests.rigs.messages import Row, row, table


def evaluated(_: Path, job: EvaluateJob) -> None:
    run_evaluate(job)


def export_over_its_source(folder: Path, overwrite: bool) -> None:
    state = build_model(CONFIG).state_dict()
    save_weights(folder / "weights", config=CONFIG, labels=LABELS, tensor=lambda name: state[name])
    job = ExportJob(path=str(folder), out=str(folder / "weights"), format="patchline", image_size=48)
    run_export_weights(job, overwrite=overwrite)


@table(
    # evaluate
    row("gone", evaluated, EvaluateJob(weights="/nowhere", data=EvaluatedData(url="/nowhere"))).says(
        "no weights at '/nowhere': there is no such file or folder; give a finished run (RUN or RUN/weights), or "
        "weights that patchline import reads: a timm or Hugging Face folder, or a .npz, .safetensors or .pth file"
    ),
    *(
        row(f"a model's id {path}", evaluated, EvaluateJob(weights=path, data=EvaluatedData(url="/nowhere"))).says(
            f"no weights at '{path}': there is no such file or folder; {is_it} a model on the Hugging Face hub, give "
            "the folder vit_s.augreg that this makes (pip install huggingface_hub):\nhf download timm/vit_s.augreg "
            "--local-dir vit_s.augreg"
        )
        for path, is_it in (("timm/vit_s.augreg", "if it is"), ("hf-hub:timm/vit_s.augreg", "it is"))
    ),
    row("threads below none", lambda _: EvaluateJob(threads=-1)).says(
        "threads is -1; allowed: 0 (each rank's share of the cores) to 1,024"
    ),
    # export_weights
    *(
        row(
            f"an export over its own weights, {overwrite}",
            export_over_its_source,
            overwrite,
        ).says("--out is 'DIR/weights', where the weights are read from; give another")
        for overwrite in (False, True)
    ),
)
def test_messages(refusal: Row, tmp_path: Path) -> None:
    refusal.check(tmp_path)
