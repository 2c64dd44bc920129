#!/bin/sh
# Copy the jars that preparation needs beside the pyspark wheel into a folder, for running it outside the image:
#   trainer_image/jars.sh [FOLDER]        default: ${FINETUNE_CACHE:-~/.cache/finetune-operator}/jars
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-${FINETUNE_CACHE:-$HOME/.cache/finetune-operator}/jars}
mkdir -p "$folder"
# Maven resolves a relative folder beside its pom.xml.
folder=$(cd "$folder" && pwd)
stamp=$folder/pom.xml

if cmp -s "$here/pom.xml" "$stamp"; then
  exit 0
fi
if ! command -v mvn >/dev/null; then
  echo "Maven is needed to fetch the jars of Delta and of stores: install it (Debian and Ubuntu: maven)" >&2
  exit 1
fi
echo "== fetching the jars of Delta and of stores into $folder"
rm -f "$folder"/*.jar
mvn --batch-mode --no-transfer-progress --quiet --file "$here/pom.xml" package -Djars="$folder"
cp "$here/pom.xml" "$stamp"
