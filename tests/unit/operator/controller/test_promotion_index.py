"""Promotions are found by what they are about, as they are now."""

from __future__ import annotations

from typing import Any

from finetune_operator.controller.promotion_index import PromotionIndex
from finetune_operator.controller.store import Store

Json = dict[str, Any]


def promotion(name: str, version: int = 1, namespace: str = "team", **spec: Any) -> Json:
    meta = {"namespace": namespace, "name": name, "uid": name, "resourceVersion": str(version)}
    return {"metadata": meta, "spec": spec}


def test_promotions_are_found_by_model_endpoint_and_job() -> None:
    store = Store()
    store.put("ModelPromotion", promotion("b", model="Support", serving={"endpoint": "chat"}))
    store.put("ModelPromotion", promotion("a", model="support", serving={"databricks": {"endpoint": "chat"}}))
    store.put("ModelPromotion", promotion("support", source={"fineTuneJobRef": {"name": "tune"}}))
    index = store.promotion_index
    assert index.of_model("SUPPORT") == [("team", "a"), ("team", "b"), ("team", "support")]
    assert index.of_endpoint("chat") == [("team", "a"), ("team", "b")]
    assert index.of_job("team", "tune") == [("team", "support")]
    assert (index.of_model("other"), index.of_job("other", "tune")) == ([], [])


def test_a_promotion_is_found_as_it_is_now() -> None:
    store = Store()
    store.put("ModelPromotion", promotion("a", model="m", serving={"endpoint": "chat"}))
    store.put("ModelPromotion", promotion("a", version=2, model="n"))
    index = store.promotion_index
    assert (index.of_model("m"), index.of_endpoint("chat"), index.of_model("n")) == ([], [], [("team", "a")])
    store.drop("ModelPromotion", promotion("a", version=3, model="n"))
    store.put("ModelPromotion", promotion("b", version=4, model="m"))
    store.replace("ModelPromotion", [], 5)
    assert index == PromotionIndex()
