"""``sparing adapt``: meta-learn which tokens of a document a language model should learn from.

After CaMeLS (Hu et al. 2023, arXiv:2305.15076) and its use in Shen et al. 2024 (arXiv:2406.14095): a small network
weighs the tokens of a stream of documents, the model takes one SGD step per document, and the network is trained
through the whole pass by the loss of answers afterwards.

    record = run(Adapt(out=Path("runs/adapt"), seconds=60))
    record.table("answers")
"""

from typing import TYPE_CHECKING

from sparing.jobs.lazy import names_from

if TYPE_CHECKING:
    from sparing.jobs.adapt.job import run, show
    from sparing.jobs.adapt.settings import Adapt
    from sparing.jobs.adapt.settings import Adapt as Settings

__all__ = ["Adapt", "Settings", "run", "show"]

__getattr__ = names_from(__name__, run="job", show="job", Adapt="settings", Settings="settings:Adapt")
