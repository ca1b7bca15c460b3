"""Registry of the tasks, keyed by configuration class and by the program that trains them."""

from typing import Any

from train.config.common import CommonConfig
from train.config.entries import Config, DiTRunConfig
from train.tasks.diffusion import DiffusionTask
from train.tasks.language import LanguageTask
from train.tasks.task import Task

TASKS: dict[type[CommonConfig], type[Task[Any]]] = {
    Config: LanguageTask,
    DiTRunConfig: DiffusionTask,
}
ENTRIES: dict[str, type[Task[Any]]] = {task.entry: task for task in TASKS.values()}


def task_of(config: CommonConfig) -> Any:
    """Return the class of a configuration's task, which takes the configuration and a mesh."""
    return TASKS[type(config)]
