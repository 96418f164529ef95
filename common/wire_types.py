"""The types that fields of messages have, and the form of a message class.

Decides bounds of values on the wire; used by `common.messages` and `common.client_messages` alone. It must
never name a type that `transport.strict_types` cannot read.
"""

from dataclasses import dataclass
from typing import Annotated, dataclass_transform

from annotated_types import Ge, Le, MaxLen

from common import limits

Count = Annotated[int, Ge(0), Le(2**63 - 1)]
Name = Annotated[str, MaxLen(64)]
Digest = Annotated[str, MaxLen(128)]
Label = Annotated[str, MaxLen(limits.LABEL_CHARACTERS)]
Detail = Annotated[str, MaxLen(2 * limits.DETAIL_CHARACTERS)]
Epoch = Annotated[int, Ge(0), Le(limits.EPOCH)]
SlotIndex = Annotated[int, Ge(0), Le(limits.SOURCE_SLOTS - 1)]


@dataclass_transform(frozen_default=True)
def wire(cls: type) -> type:
    """A frozen slotted dataclass; `transport.strict_types` reads its field types and coerces nothing."""
    return dataclass(frozen=True, slots=True)(cls)
