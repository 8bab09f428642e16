"""Which part of an object keeps it from being sent to another process?"""

import pickle


def unpicklable_attributes(owner: object) -> list[str]:
    """Names of the attributes of `owner` that cannot be pickled."""
    return [name for name, value in getattr(owner, "__dict__", {}).items() if not _can_be_pickled(value)]


def blame(owner: object) -> str:
    """The attributes to blame, as part of a sentence; 'it' if none of them alone is."""
    culprits = unpicklable_attributes(owner)
    return f"its attribute {' and '.join(map(repr, culprits))}" if culprits else "it"


def _can_be_pickled(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # whatever a class does when it is pickled
        return False
    return True
