#!/bin/sh
# Rebuilds charts.min.js and LICENSES.txt from the versions in package-lock.json: sh build.sh
set -eu
cd "$(dirname "$0")"
npm ci
npx esbuild entry.js --bundle --minify --format=iife --global-name=charts --target=es2020 \
    --legal-comments=none --metafile=meta.json --outfile=charts.min.js
node licenses.mjs > LICENSES.txt
rm -rf node_modules meta.json
