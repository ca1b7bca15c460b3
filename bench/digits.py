"""Do the digits that a diffusion transformer draws look like those that were asked for?

    python -m bench.digits --load runs/dit_tiny      # after make dit; under torchrun too

A support vector machine that has learnt four fifths of scikit-learn's handwritten digits reads the drawn ones. Its
share of right answers on the last fifth stands beside that as what is possible at most; where the drawn digit has
nothing to do with the one asked for, it is one in ten. The picture has a row for each digit.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from checkpoint.manifest import checkpoint_folder
from data.latents.dataset import Digits
from parallel.mesh import distributed_mesh
from runtime.processes import launched_world_size
from runtime.together import is_first, raise_together
from tools.arguments import parser_for, positive
from tools.sample_dit import check_finite, config_of, fitted, load_sampler
from train.config.flags import ConfigError
from train.run import run_entry
from train.sampling import SamplingConfig, by_class, write_grid

LEAST_AGREEMENT, LEAST_ACCURACY = 0.80, 0.97
SHOWN = 10
"""Samples of each digit in the picture."""


def learnt(seed: int = 0) -> tuple[Any, float]:
    """Train a classifier of images [N, 1, 8, 8] from -1 to 1; return it and its accuracy on unseen digits."""
    from sklearn.svm import SVC

    digits = Digits()
    order = np.random.RandomState(seed).permutation(len(digits))
    seen, unseen = np.split(order, [len(order) * 4 // 5])
    classifier = SVC(gamma=0.02, C=10.0).fit(_flat(digits.images[seen]), digits.labels[seen])
    return classifier, agreement(classifier, digits.images[unseen], digits.labels[unseen])


def agreement(classifier: Any, images: np.ndarray, labels: Sequence[int] | np.ndarray) -> float:
    """Return the share of the images [N, 1, 8, 8] that the classifier takes for their labels [N]."""
    return float((classifier.predict(_flat(images)) == np.asarray(labels)).mean())


def _flat(images: np.ndarray) -> np.ndarray:
    return images.clip(-1, 1).reshape(len(images), -1)


def report(latents: Tensor, labels: Sequence[int], picture: Path) -> bool:
    """Print how the classifier reads the drawn digits and write the picture; return whether both bounds are met."""
    classifier, accuracy = learnt()
    images, each = latents.numpy(), len(labels) // 10
    found = agreement(classifier, images, labels)
    parts = zip(np.split(images, 10), np.split(np.array(labels), 10), strict=True)
    by_digit = [agreement(classifier, *part) for part in parts]
    print(f"the classifier is right on {accuracy:.1%} of real digits that it has not seen")
    print(f"it takes {found:.1%} of {len(labels)} drawn digits for the ones asked for")
    print("by digit: " + ", ".join(f"{digit} {share:.0%}" for digit, share in enumerate(by_digit)))
    shown = min(each, SHOWN)
    rows = latents.unflatten(0, (10, each))[:, :shown].flatten(0, 1)
    write_grid(picture, rows, shown)
    print(f"wrote {picture}")
    return found >= LEAST_AGREEMENT and accuracy >= LEAST_ACCURACY


def main(argv: list[str]) -> None:
    """Run the command."""
    args = _parse(argv)
    config = fitted(config_of(args.load), launched_world_size())
    if config.model.latent_shape != Digits.shape or config.model.num_classes != 10:
        raise ConfigError(f"{args.load} is no run on digits: latent_shape is {config.model.latent_shape}")
    sampling = SamplingConfig(guidance=args.guidance, sample_steps=args.steps)
    sampling.check_guidance(config.model.class_dropout_prob)
    labels = by_class(range(10), args.num_samples)
    with distributed_mesh(config.mesh) as mesh:
        sampler, iteration = load_sampler(config, mesh, args.load, sampling, args.seed)
        if is_first():
            print(f"drawing {len(labels)} digits by {args.load}, iteration {iteration}", flush=True)
        latents = sampler.draw(labels)
        with raise_together():
            check_finite(latents, checkpoint_folder(args.load, iteration), args.guidance)
            if is_first() and not report(latents, labels, args.picture or args.load / "samples" / "digits.png"):
                raise ConfigError(f"agreement is below {LEAST_AGREEMENT:.0%}: {args.load} has not learnt digits")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_for("python -m bench.digits", __doc__)
    parser.add_argument("--load", type=Path, default=Path("runs/dit_tiny"), metavar="DIR", help="folder of the run")
    parser.add_argument("--num-samples", type=positive, default=20, metavar="N", help="samples of each digit")
    parser.add_argument("--guidance", type=float, default=2.0, metavar="X", help="weight of the class over none")
    parser.add_argument(
        "--steps", type=positive, default=50, metavar="N", help="times that the model is asked for a sample"
    )
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="seed of the noise")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="where to draw; by default DIR/samples/digits.png")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_entry(main)
