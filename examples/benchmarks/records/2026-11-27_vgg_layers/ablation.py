"""Train a VGG with one group of its layers dense, or with one group compressed alone.

`but_GROUP` is gradients in two bits, all but of the group's leaves, which go dense;
`only_GROUP` is the contrary. Prefixes are those of training/methods.py. Other arguments
are those of the benchmark `quality`:

    export PYTHONPATH=examples:examples/benchmarks
    python RECORD/ablation.py --data-dir DIR --out FILE --methods dense turns4but_wide
"""

import tyro
from quality import run
from training.methods import METHODS, arguments

# The biases of dense layers are in two groups.
GROUPS = {
    "first": ("Conv_0", "Conv_1"),
    "middle": ("Conv_2", "Conv_3"),
    "wide": ("Conv_4", "Conv_5"),
    "last": ("Conv_6", "Conv_7"),
    "hidden": ("Dense_0", "Dense_1"),
    "head": ("Dense_2",),
    "vectors": ("bias", "scale"),
}


def is_in(group: str, path: str) -> bool:
    """Return whether a leaf is of the group."""
    return any(name in path for name in GROUPS[group])


for group in GROUPS:
    METHODS[f"but_{group}"] = {
        **arguments("allreduced16"),
        "compress": lambda path, _, group=group: not is_in(group, path),
    }
    METHODS[f"only_{group}"] = {
        **arguments("allreduced16"),
        "compress": lambda path, _, group=group: is_in(group, path),
    }

if __name__ == "__main__":
    run.main(tyro.cli(run.Args, description=__doc__))
