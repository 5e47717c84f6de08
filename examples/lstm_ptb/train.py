"""Train GraVAC's LSTM on the words of the Penn Treebank.

Every replica reads a contiguous part of the text, window by window, and keeps the
LSTM's state from one to the next. Lines marked `# gravac` are all that is particular to
compressed gradients.

    python examples/lstm_ptb/train.py --data-dir DIR --preset paper
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1]))
from lstm_ptb.config import PRESETS, Config
from lstm_ptb.model import LanguageModel
from tasks import cross_entropy, pipeline, text
from training import Options, Replicas, Run, main, replica_key

import gravac_jax as gravac


def train(config: Config, options: Options) -> dict[str, float]:
    """Train one model, and return its loss and perplexity on the test data."""
    replicas = Replicas(options.replicas)
    here = {"replicas": replicas.count, "local": replicas.local}
    (words, *held_out), vocabulary = text.ptb_tokens(options.data_dir)
    batches = pipeline.tracks(words, rows=config.rows, length=config.length, **here)

    sizes = vocabulary, config.width, config.layers, config.dropout
    model = LanguageModel(*sizes, dtype=options.dtype)
    key, one = jax.random.key(options.seed), jnp.zeros((1, 1), jnp.int32)
    params = model.init(key, one, model.silent(1), is_training=False)["params"]

    def loss_fn(params: Any, states: Any, batch: Any, key: Any = None) -> Any:
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        begun = lambda x: jnp.where(batch["is_first"][:, None], jnp.zeros_like(x), x)
        logits, states = model.apply(
            {"params": params},
            inputs,
            jax.tree.map(begun, states),
            is_training=key is not None,
            rngs={} if key is None else {"dropout": key},
        )
        return cross_entropy(logits, targets), states

    rate = config.learning_rate
    if config.warm_up_steps:
        rate = optax.linear_schedule(0.0, rate, config.warm_up_steps)
    clip = gravac.ClipByGlobalNorm(config.clip) if config.clip else None
    exchange = {**options.exchange, "clip": clip, "weight_decay": config.weight_decay}
    tx = optax.chain(
        gravac.transform(**exchange),  # gravac
        optax.sgd(rate, momentum=config.momentum),
    )

    def train_step(
        params: Any, opt_state: Any, states: Any, batch: Any, **times: Any
    ) -> Any:
        key = replica_key(options.seed, opt_state)
        grad = gravac.value_and_grad(loss_fn, has_aux=True)  # gravac
        own = gravac.own_params(tx, params, opt_state)  # gravac
        (loss, states), grads = grad(own, states, batch, key)
        updates, opt_state = tx.update(grads, opt_state, params, at="own", **times)
        return optax.apply_updates(params, updates), opt_state, states, loss

    step = replicas.parallel(train_step, carried=1)
    evaluated = jax.jit(loss_fn)

    def evaluate(params: Any, words: np.ndarray) -> dict[str, float]:
        rows, losses = config.evaluation_rows, []
        states = replicas.shard(model.silent(rows * len(replicas.local)))
        windows = pipeline.tracks(
            words, rows=rows, length=config.length, epochs=1, **here
        )
        for batch in windows:
            loss, states = evaluated(params, states, replicas.shard(batch))
            losses.append(loss)
        loss = float(np.mean(jax.device_get(losses)))
        return {"loss": loss, "perplexity": float(np.exp(loss))}

    state = gravac.place((params, tx.init(params)), replicas.where)  # gravac
    states = replicas.shard(model.silent(config.rows * len(replicas.local)))
    with Run("lstm_ptb", config, options, replicas, batches) as run:
        validate = lambda state: evaluate(state[0], held_out[0])
        state = run.train(step, (*state, states), validate)
    params, _ = replicas.flush(tx, *state[:2])  # gravac
    return evaluate(params, held_out[1])


if __name__ == "__main__":
    main(train, PRESETS)
