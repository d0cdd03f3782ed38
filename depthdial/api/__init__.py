"""The Python front door: open a model, generate text, train a recipe, measure the depth curve."""

from depthdial.api.model import Completion, Model, load, resume, sweep, train

__all__ = ["Completion", "Model", "load", "resume", "sweep", "train"]
