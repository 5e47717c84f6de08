"""Tasks that examples and benchmarks train: data, a model and a loss."""

from tasks.registry import TASKS as TASKS
from tasks.registry import cross_entropy as cross_entropy
from tasks.registry import load as load
from tasks.task import DataError as DataError
from tasks.task import Source as Source
from tasks.task import Task as Task
