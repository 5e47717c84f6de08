"""What training programs share: methods, replicas, runs and their figures."""

from training.replicas import Replicas as Replicas
from training.replicas import replica_key as replica_key
from training.run import Options as Options
from training.run import Run as Run
from training.run import main as main
from training.run import mean as mean
