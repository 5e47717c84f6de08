"""What training programs share: where replicas are, and what a run leaves behind."""

from training.replicas import Replicas as Replicas
from training.replicas import replica_key as replica_key
from training.run import Options as Options
from training.run import Run as Run
from training.run import main as main
from training.run import mean as mean
