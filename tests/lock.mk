# What is fetched from elsewhere, and at which version.
#
# `make lock` resolves every Python dependency anew, with hashes. tests/requirements.txt is what development and
# tests install; the images' files are cut from it, so all of them hold the same versions. torch is left out by the
# override in pyproject.toml: which build is right is the machine's business.

LOCK := $(VENV)/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
  --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
  --no-emit-package finetune-crds --no-emit-package finetune-operator --no-emit-package finetune-trainer --no-emit-package torch
LOCK_IMAGE := $(LOCK) --constraint tests/requirements.txt

.PHONY: lock
lock: venv ## Resolve the Python dependencies anew
	@echo "== resolving Python packages"
	@$(LOCK) crds/pyproject.toml operator/pyproject.toml trainer_image/pyproject.toml --all-extras \
	  --group pyproject.toml:dev --output-file tests/requirements.txt
	@$(LOCK_IMAGE) operator/pyproject.toml --output-file operator/requirements.txt
	@$(LOCK_IMAGE) trainer_image/pyproject.toml --extra prep --output-file trainer_image/requirements-prep.txt
	@$(LOCK_IMAGE) trainer_image/pyproject.toml --extra train --output-file trainer_image/requirements-train.txt
	@$(BIN)/python -m cluster.common_requirements
	@$(LOCK) tests/bench/prep/datatrove.in --output-file tests/bench/prep/datatrove.txt
	@$(LOCK_IMAGE) tests/long/trainer/lm_eval.in --output-file tests/long/trainer/lm_eval.txt

.PHONY: jars
jars: java ## Fetch the jars of Delta and of stores for Spark outside the image
	@command -v mvn >/dev/null || $(call install,maven,The jars of Delta and of stores come through Maven)
	@trainer_image/jars.sh

.PHONY: classes
classes: venv jars ## Keep the classes of Spark as the JVM has them in memory, for the tests
	@$(BIN)/python -m unit.trainer.prep.class_archive
