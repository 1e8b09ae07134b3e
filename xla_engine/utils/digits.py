"""Numbers that strangers write in digits, in headers, forms and query strings."""


def number_of(text: str, most: int) -> int | None:
    """The number that ASCII digits stand for, `most` + 1 for any that is larger; None if the text is no such number.

    However many digits there are: Python takes quadratic time to convert them, and a part of them is another number.
    """
    if not (text.isascii() and text.isdigit()):
        return None
    digits = text.lstrip("0")
    return most + 1 if len(digits) > len(str(most)) else min(int(digits or 0), most + 1)
