"""Train a small GPT with AdamW.

Each replica has an AdamW of its own, takes gradients at params of its own, and
exchanges its updates: `gravac.adamw`. Lines marked `# gravac` are all that is
particular to it.

    python examples/transformer_lm/train.py --data-dir TEXT --preset paper
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

sys.path.insert(0, str(Path(__file__).parents[1]))
from tasks import cross_entropy, pipeline, text
from training import Options, Replicas, Run, main, mean
from transformer_lm.config import PRESETS, Config
from transformer_lm.model import LanguageModel

import gravac_jax as gravac


def optimizer(config: Config, options: Options) -> optax.GradientTransformation:
    """Return AdamW, together with the exchange that it needs."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warm_up_steps,
        decay_steps=max(config.steps, config.warm_up_steps + 1),
        end_value=config.learning_rate / 10,
    )
    is_matrix = lambda params: jax.tree.map(lambda x: x.ndim == 2, params)
    return gravac.adamw(  # gravac
        schedule,
        b1=config.b1,
        b2=config.b2,
        weight_decay=config.weight_decay,
        mask=is_matrix,
        clip=gravac.ClipByGlobalNorm(config.clip),
        **options.exchange,
    )


def train(config: Config, options: Options) -> dict[str, float]:
    """Train one model, and return its loss on the test text, in nats a token."""
    replicas = Replicas(options.replicas)
    here = {"replicas": replicas.count, "local": replicas.local}
    read = {"bytes": text.read_bytes, "ptb": text.read_ptb}[config.data]
    (windows, *held_out), vocabulary = read(options.data_dir, config.length)
    batches = pipeline.batches(windows, rows=config.rows, seed=options.seed, **here)

    sizes = config.length, config.layers, config.width, config.heads
    model = LanguageModel(vocabulary, *sizes, dtype=options.dtype)
    one = jnp.zeros((1, config.length), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(options.seed), one)["params"]
    tx = optimizer(config, options)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        logits = model.apply({"params": params}, inputs)
        return cross_entropy(logits, targets)

    grad = gravac.value_and_grad(  # gravac
        loss_fn, micro_batches=config.micro_batches
    )

    def train_step(params: Any, opt_state: Any, batch: Any, **times: Any) -> Any:
        own = gravac.own_params(tx, params, opt_state)  # gravac
        loss, grads = grad(own, batch)
        updates, opt_state = tx.update(grads, opt_state, params, **times)
        return optax.apply_updates(params, updates), opt_state, loss

    evaluated = jax.jit(lambda params, batch: {"loss": loss_fn(params, batch)})

    def evaluate(params: Any, windows: text.Windows) -> dict[str, float]:
        rows = pipeline.evaluation(windows, config.evaluation_rows, **here)
        return mean([evaluated(params, replicas.shard(batch)) for batch in rows])

    state = gravac.place((params, tx.init(params)), replicas.where)  # gravac
    step = replicas.parallel(train_step)
    with Run("transformer_lm", config, options, replicas, batches) as run:
        state = run.train(step, state, lambda state: evaluate(state[0], held_out[0]))
    params, _ = replicas.flush(tx, *state)  # gravac
    return evaluate(params, held_out[1])


if __name__ == "__main__":
    main(train, PRESETS)
