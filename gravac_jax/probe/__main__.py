"""Runs the probe: `python -m gravac_jax.probe`."""

from gravac_jax import probe

if __name__ == "__main__":
    probe.main()
