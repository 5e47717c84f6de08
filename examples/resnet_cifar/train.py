"""Train GraVAC's ResNet-101 on CIFAR-10.

Statistics of the norms are averaged over replicas in every step: they are no gradients.
Lines marked `# gravac` are all that is particular to compressed gradients.

    python examples/resnet_cifar/train.py --data-dir DIR --preset paper --method default
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

sys.path.insert(0, str(Path(__file__).parents[1]))
from resnet_cifar.config import PRESETS, Config
from resnet_cifar.model import ResNet
from tasks import cifar, cross_entropy, pipeline
from training import Options, Replicas, Run, main, mean, methods

import gravac_jax as gravac


def train(config: Config, options: Options) -> dict[str, float]:
    """Train one model; its loss and accuracy on the test images."""
    replicas = Replicas(options.replicas)
    here = {"replicas": replicas.count, "local": replicas.local}
    (images, *held_out), _ = cifar.read_cifar(options.data_dir, cifar.CIFAR10)
    batches = pipeline.batches(images, rows=config.rows, seed=options.seed, **here)

    dtype = jnp.bfloat16 if options.bfloat16 else jnp.float32
    model = ResNet(
        config.blocks, config.width, config.has_imagenet_stem, config.head, dtype
    )
    key, one = jax.random.key(options.seed), images[0]["image"][None]
    variables = jax.jit(model.init, static_argnames="is_training")(
        key, one, is_training=False
    )
    params, statistics = variables["params"], variables["batch_stats"]

    exchange = options.exchange
    drops = {round(share * config.steps): 0.1 for share in config.drops}
    schedule = optax.piecewise_constant_schedule(config.learning_rate, drops)
    tx = optax.chain(
        gravac.transform(**exchange, weight_decay=config.weight_decay),  # gravac
        *methods.after(exchange, optax.trace(config.momentum), clip=None),
        optax.scale_by_learning_rate(schedule),
    )

    def train_step(
        params: Any, statistics: Any, opt_state: Any, batch: Any, **times: Any
    ) -> Any:
        def loss_fn(params: Any, batch: Any) -> Any:
            logits, updated = model.apply(
                {"params": params, "batch_stats": statistics},
                batch["image"],
                is_training=True,
                mutable="batch_stats",
            )
            return cross_entropy(logits, batch["label"]), updated["batch_stats"]

        grad = gravac.value_and_grad(loss_fn, has_aux=True)  # gravac
        (loss, own), grads = grad(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, **times)
        params = optax.apply_updates(params, updates)
        return params, jax.lax.pmean(own, "data"), opt_state, loss

    @jax.jit
    def evaluated(params: Any, statistics: Any, batch: Any) -> dict[str, jax.Array]:
        variables = {"params": params, "batch_stats": statistics}
        logits = model.apply(variables, batch["image"], is_training=False)
        hits = logits.argmax(-1) == batch["label"]
        loss = cross_entropy(logits, batch["label"])
        return {"loss": loss, "accuracy": hits.astype(jnp.float32).mean()}

    def evaluate(state: Any, images: cifar.Images) -> dict[str, float]:
        rows = pipeline.evaluation(images, config.evaluation_rows, **here)
        return mean([evaluated(*state[:2], replicas.shard(batch)) for batch in rows])

    state = (params, statistics, tx.init(params))
    state = gravac.place(state, replicas.where)  # gravac
    step = replicas.parallel(train_step)
    with Run("resnet_cifar", config, options, replicas, batches) as run:
        state = run.restore(state)
        for i in run.steps:
            *state, loss = step(*state, next(batches), **run.times())
            figures = evaluate(state, held_out[0]) if run.is_evaluation(i) else {}
            if run.end_step(i, state, loss, figures):
                break
    return evaluate(state, held_out[1])


if __name__ == "__main__":
    main(train, PRESETS)
