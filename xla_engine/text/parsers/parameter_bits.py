"""Sets of properties in the parameters of rules, as llguidance's Lark writes them."""

MOST = 64  # bits of a rule's parameter


def all_set(bits: list[int]) -> str:
    """The condition that each of these bits is set."""
    found = "true"
    for bit in bits:
        found = f"bit_set({bit})" if found == "true" else f"and(bit_set({bit}), {found})"
    return found
