"""placeholder"""

from finetune_operator.decide.promotion.draft import Draft


def serve(draft: Draft) -> None: ...
