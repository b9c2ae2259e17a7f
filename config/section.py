"""`Section`: the base class of the parts of the run config."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A config section: unknown keys are errors, values never change after loading."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)
