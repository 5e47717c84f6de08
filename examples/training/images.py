"""Train a network for images with norms over the batch: the ResNet and the VGG.

Statistics of the norms are averaged over replicas in every step: they are no gradients.
Lines marked `# gravac` are all that is particular to compressed gradients.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from tasks import cifar, cross_entropy, pipeline

import gravac_jax as gravac
from training.replicas import Replicas, replica_key
from training.run import Options, Run, mean


def train(
    name: str,
    model: nn.Module,
    layout: cifar.Layout,
    learning_rate: optax.ScalarOrSchedule,
    config: Any,
    options: Options,
) -> dict[str, float]:
    """Train one model, and return its loss and accuracies on the test images.

    Args:
      name: The name of the program.
      model: The network; it is called with images and `is_training`.
      layout: The data set.
      learning_rate: The learning rate, or its schedule.
      config: The program's hyper-parameters.
      options: The options of the command line.
    """
    replicas = Replicas(options.replicas)
    here = {"replicas": replicas.count, "local": replicas.local}
    (images, *held_out), _ = cifar.read_cifar(options.data_dir, layout)
    batches = pipeline.batches(images, rows=config.rows, seed=options.seed, **here)

    key, one = jax.random.key(options.seed), images[0]["image"][None]
    init = jax.jit(model.init, static_argnames="is_training")
    variables: Any = init(key, one, is_training=False)
    params, statistics = variables["params"], variables["batch_stats"]
    clip = gravac.ClipByGlobalNorm(config.clip) if config.clip else None
    exchange = {**options.exchange, "clip": clip, "weight_decay": config.weight_decay}
    tx = optax.chain(
        gravac.transform(**exchange),  # gravac
        optax.sgd(learning_rate, momentum=config.momentum),
    )

    def train_step(
        params: Any, statistics: Any, opt_state: Any, batch: Any, **times: Any
    ) -> Any:
        key = replica_key(options.seed, opt_state)

        def loss_fn(params: Any, batch: Any) -> Any:
            logits, updated = model.apply(
                {"params": params, "batch_stats": statistics},
                batch["image"],
                is_training=True,
                mutable="batch_stats",
                rngs={"dropout": key},
            )
            return cross_entropy(logits, batch["label"]), updated["batch_stats"]

        grad = gravac.value_and_grad(loss_fn, has_aux=True)  # gravac
        own = gravac.own_params(tx, params, opt_state)  # gravac
        (loss, mine), grads = grad(own, batch)
        updates, opt_state = tx.update(grads, opt_state, params, at="own", **times)
        params = optax.apply_updates(params, updates)
        return params, jax.lax.pmean(mine, "data"), opt_state, loss

    @jax.jit
    def evaluated(params: Any, statistics: Any, batch: Any) -> dict[str, jax.Array]:
        variables = {"params": params, "batch_stats": statistics}
        logits: Any = model.apply(variables, batch["image"], is_training=False)
        best = jnp.argsort(-logits)[:, :5] == batch["label"][:, None]
        share = lambda hits: hits.any(-1).astype(jnp.float32).mean()
        loss = cross_entropy(logits, batch["label"])
        return {"loss": loss, "accuracy": share(best[:, :1]), "top5": share(best)}

    def evaluate(state: Any, images: cifar.Images) -> dict[str, float]:
        rows = pipeline.evaluation(images, config.evaluation_rows, **here)
        return mean([evaluated(*state[:2], replicas.shard(batch)) for batch in rows])

    state = (params, statistics, tx.init(params))
    state = gravac.place(state, replicas.where)  # gravac
    step = replicas.parallel(train_step)
    with Run(name, config, options, replicas, batches) as run:
        validate = lambda state: evaluate(state, held_out[0])
        params, statistics, opt_state = run.train(step, state, validate)
    params, _ = replicas.flush(tx, params, opt_state)  # gravac
    return evaluate((params, statistics), held_out[1])
