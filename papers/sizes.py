"""Published sizes: memory that smaller moments save, and the work of diffusion transformers.

Each figure follows from counts alone: no rate and no constant of the planner has a part in it.
"""

from collections.abc import Iterator
from functools import partial

from model.dit import multiply_adds, num_dit_parameters
from model.dit_config import DiTConfig
from papers import rows
from papers.table import TableRow
from tools.common.arguments import run_command
from train.optimizers.config import OptimizerConfig

LATENTS = (4, 32, 32)
"""Channels, height and width of the latents of 256 x 256 images, as DiT counts them."""
CLASSES = 1000


def moment_bytes(dtype: str) -> float:
    """Return the bytes per parameter of both of Adam's moments, as the planner counts them."""
    config = OptimizerConfig(exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    return config.spec.state_bytes(config)


def moments() -> Iterator[TableRow]:
    """Yield the memory in 10^9 bytes that smaller moments save, for each row of tables/moments.csv.

    All else in the memory is the same, so the difference of two peaks is that of the moments.
    """
    for row in rows.published("moments"):
        saved = moment_bytes(row["moments"]) - moment_bytes(row["smaller"])
        labels: dict[str, str | int] = {
            "model": row["model"],
            "moments": row["moments"],
            "smaller": row["smaller"],
        }
        published = {"saved_gb": round(float(row["gb"]) - float(row["smaller_gb"]), 2)}
        predictions = {"saved_gb": round(saved * float(row["parameters_m"]) / 1e3, 2)}
        yield TableRow(labels, published, predictions, "1 GPU")


def dit() -> Iterator[TableRow]:
    """Yield the parameters and multiply-adds of DiT's models (its tables 1 and 4)."""
    for row in rows.published("dit_sizes"):
        config = DiTConfig(
            num_layers=int(row["layers"]),
            hidden_size=int(row["hidden"]),
            num_attention_heads=int(row["heads"]),
            patch_size=int(row["patch"]),
            latent_shape=LATENTS,
            num_classes=CLASSES,
            learn_sigma=True,
        )
        published = {"params_m": float(row["params_m"]), "gmacs": float(row["gmacs"])}
        predictions = {
            "params_m": round(num_dit_parameters(config) / 1e6, 1),
            "gmacs": round(multiply_adds(config) / 1e9, 2),
        }
        yield TableRow({"model": f"{row['model']}/{row['patch']}"}, published, predictions, "any")


TABLES: rows.TableFunctions = {
    "moments": moments,
    "dit": dit,
}
main = partial(rows.main, "sizes", TABLES, __doc__)

if __name__ == "__main__":
    run_command(main)
