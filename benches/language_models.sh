#!/usr/bin/env bash
# Plans large language models for 8, 64 and 512 H100 (exit code 3: none fits) and writes benches/results/language-models.md: the plan, its time,
# and the best plans of other kinds. Two minutes; costs are analytic, so no GPU is needed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
pipec=$(realpath "${PIPEC:-$root/target/release/pipec}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

"$pipec" zoo llama3-8b --structure -qq -o llama3-8b.onnx
"$pipec" zoo llama3-70b --structure -qq -o llama3-70b.onnx
"$pipec" zoo gpt-oss --hidden 4096 --layers 32 --ffn 14336 --experts 8 --chosen 2 --vocabulary 32000 --context 4096 \
    --heads 32 --kv-heads 8 --head-size 128 --structure -qq -o mixtral-8x7b.onnx
"$pipec" zoo gpt-oss --hidden 2048 --layers 48 --ffn 768 --experts 128 --chosen 8 --vocabulary 151936 --context 4096 \
    --heads 32 --kv-heads 4 --head-size 128 --structure -qq -o qwen3-30b-a3b.onnx

result=$folder/language-models.md
cat > "$result" <<'TEXT'
# Plans for language models on H100

`benches/language_models.sh` writes this page. [Language models](../../docs/language-models.md) explains it.
The models are those of the zoo, in the sizes of Llama 3, Mixtral 8x7B and Qwen3 30B-A3B. `one device` and similar lines are left out.
TEXT
for model in llama3-8b llama3-70b mixtral-8x7b qwen3-30b-a3b; do
    for gpus in 8 64 512; do
        case $gpus in
        8) levels=8:450GB/s ;;
        *) levels=8:450GB/s,$((gpus / 8)):50GB/s ;;
        esac
        for target in torchtitan megatron; do
            flags="--levels $levels --profile analytic:h100 --precision bf16 --optimizer adam --batch $((2 * gpus)) --target $target"
            rm -f plan.json
            printf '\n## %s on %s H100, %s\n\n```text\n$ pipec partition %s %s --compare\n' \
                "$model" "$gpus" "$target" "$model.onnx" "$flags" >> "$result"
            # shellcheck disable=SC2086
            { COLUMNS=160 "$pipec" partition "$model.onnx" $flags --compare -o plan.json 2>&1 || [ $? = 3 ]; } \
                | grep -v '^warning: external\|^costs are\|^wrote\|^replaced\|^next:\|^  *pipec \|^one device\|^collectives\|^busiest\|^$' >> "$result"
            printf '```\n' >> "$result"
        done
    done
done
mv "$result" "$root/benches/results/"
