"""A task on made-up samples in the place of text, with attention of a test's own."""

from model.registry import build_model
from train.objectives.language import NextToken
from train.tasks.language import LanguageTask
from train.tasks.task import Data


class TinyTask(LanguageTask):
    """A language model that calls the attention that it is given, on samples that it is given."""

    def __init__(self, config, mesh, cp, attend=None, train=None, valid=None):
        self.cp, self._attend, self._data = cp, attend, Data(train, valid)
        super().__init__(config, mesh)

    def set_up(self):
        self.objective = NextToken(self.cp, self.mesh.device)

    def build_model(self):
        return build_model(self.config.model, *([] if self._attend is None else [self._attend]))

    def load_data(self, tokenizer):
        return self._data

    def description(self, data):
        return "a tiny run"
