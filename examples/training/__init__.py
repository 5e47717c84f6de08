"""What training programs share: replicas, runs, and what they exchange."""

from training.replicas import Replicas as Replicas
from training.replicas import replica_key as replica_key
from training.run import Options as Options
from training.run import Run as Run
from training.run import file_name as file_name
from training.run import main as main
from training.run import mean as mean
