say() { printf 'bootstrap: %s\n' "$*" >&2; }
die() { code=$1; shift; say "$*"; exit "$code"; }

# The first Python >= 3.11, preferring one with a usable torch; sets $base, and $torch to "VERSION FOLDER".
find_python() {
    base='' torch=''
    for each in ${FLATOUT_PYTHON:-python3 python /venv/main/bin/python /opt/conda/bin/python python3.13 python3.12 python3.11}; do
        "$each" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        base=${base:-$each}
        torch=$("$each" -c 'import os, torch as t
if tuple(map(int, t.__version__.split(".")[:2])) >= (2, 6): print(t.__version__, os.path.dirname(os.path.dirname(t.__file__)))' 2>/dev/null)
        [ -z "$torch" ] || { base=$each; return; }
    done
    [ -n "$base" ] || die 5 "no Python >= 3.11 found: use another image, or set FLATOUT_PYTHON."
}

# Once per machine and package; a stamp file that is written last says it is done.
install() {
    [ "$(cat .venv/installed 2>/dev/null)" != "$package $needs" ] || return 0
    find_python
    say "installing $package with $base, torch: ${torch:-none yet, will be installed}"
    rm -rf .venv
    "$base" -m venv --system-site-packages .venv || die 5 "$base cannot create environments: apt install python3-venv"
    : >.venv/constraints.txt
    if [ -n "$torch" ]; then
        echo "torch==${torch%% *}" >.venv/constraints.txt
        for site in .venv/lib/python*/site-packages; do echo "${torch#* }" >"$site/kept_torch.pth"; done
    fi
    for wait in 10 60 0; do
        # shellcheck disable=SC2086  # split into words
        PIP_CONSTRAINT=.venv/constraints.txt .venv/bin/python -m pip install -q --no-input "$package" $needs &&
            printf '%s\n' "$package $needs" >.venv/installed && return
        sleep "$wait"
    done
    die 5 "$package could not be installed."
}

# Runs train and forwards signals to it, so that it saves.
run() {
    child='' stopping=''
    trap 'stopping=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM INT HUP
    train &
    child=$!
    [ -z "$stopping" ] || kill -TERM "$child" 2>/dev/null
    while :; do
        wait "$child"
        code=$?
        kill -0 "$child" 2>/dev/null || break
    done
    trap - TERM INT HUP
    [ -z "$stopping" ] || code=75
}

if [ -z "$work" ]; then work=$HOME/flatout; [ ! -d /workspace ] || work=/workspace/flatout; fi
work=$work${FLATOUT_NODE:+/node$FLATOUT_NODE}
{ mkdir -p "$work" && cd "$work"; } || die 5 "cannot use $work"
work=$PWD PATH=$PWD/.venv/bin:$PATH
[ ! -e over ] || { say "this training is finished, results: $work/runs. To train again: rm $work/over"; exit 0; }
install
[ -e fetched ] || { say "fetching data" && sh -c "$fetch" && : >fetched; } || die 3 "the data could not be fetched."
for wait in 10 60 0; do
    run
    case $code in 0 | 2 | 3 | 4 | 6 | 75) break ;; esac
    [ "$wait" != 0 ] || break
    say "training ended with exit code $code; retrying in $wait s"
    sleep "$wait"
done
[ "$code" != 75 ] || die 75 "interrupted and saved; run this again to continue."
# A training that stopped early, for example by --budget, is not finished.
# shellcheck disable=SC2012  # the newest
newest=$(ls -t runs/*/*/run.json 2>/dev/null | head -n 1)
[ "$code" != 0 ] || grep -qs '"finished": false' "$newest" || : >over
say "ended with exit code $code"
FLATOUT_EXIT=$code sh -c "$at_end"
exit "$code"
