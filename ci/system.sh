#!/bin/sh
# Finds what the project needs of the machine, and prints where it is:
#
#   ci/system.sh python    a Python >= 3.11 with venv and headers, and a C compiler. PYTHON, or the
#                          first one that was compiled with optimisations, or the first one
#   ci/system.sh java      the home of a Java >= 17
#   ci/system.sh clang     a clang that compiles for a fuzzer
#   ci/system.sh postgres  the folder with the programs of a PostgreSQL >= 13
#   ci/system.sh chromium  a Chromium that runs without a window: CHROMIUM, or one on PATH
#   ci/system.sh tshark    a tshark >= 4, which is Wireshark without a window: TSHARK, or one on PATH
#   ci/system.sh zsh       the shell zsh on PATH; fish likewise
#
# What is missing is installed where that is possible (root on Debian), unless
# AQUEDUCT_NO_INSTALL is set; else the error names the command to type.
set -eu

say() { echo "ci/system.sh: $*" >&2; }

debian() { [ -e /etc/debian_version ] && command -v apt-get >/dev/null; }

install() { # what is missing, then the packages
    missing=$1
    shift
    command="apt-get update && apt-get install -y --no-install-recommends $*"
    if debian && [ "$(id -u)" = 0 ] && [ -z "${AQUEDUCT_NO_INSTALL:-}" ]; then
        say "$missing; installing $*"
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq
        apt-get install -qq -y --no-install-recommends "$@" >/dev/null
    elif debian; then
        say "$missing. Type: sudo sh -c '$command'"
        exit 1
    elif [ "$(uname)" = Darwin ]; then
        say "$missing. Install it (brew install python openjdk@17 zsh fish wireshark), and see the head of ci/system.sh"
        exit 1
    else
        say "$missing. Install it (Debian: $command), and see the head of ci/system.sh"
        exit 1
    fi
}

# Prints the program of a Python if it will do. With a second argument it must have been compiled
# with optimisations: what `pyenv install` makes was not, and takes 1.4 times as long for everything.
use_python() {
    "$1" -c '
import ensurepip, os, sys, sysconfig
header = os.path.join(sysconfig.get_path("include"), "Python.h")
asked = "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")
optimised = asked or sys.base_prefix == "/usr"  # Debian asks for it in another way
if sys.version_info < (3, 11) or not os.path.exists(header) or (sys.argv[1:] and not optimised):
    sys.exit(1)
print(getattr(sys, "_base_executable", sys.executable))' ${2:+"$2"} 2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        use_python "$PYTHON" && return
    fi
    names='python3 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3'
    for name in $names; do
        use_python "$name" optimised && return
    done
    for name in $names; do
        use_python "$name" && return
    done
    return 1
}

java_version() { # of the java program given: 17, or nothing
    "$1" -version 2>&1 | sed -n 's/.*version "\([0-9]*\)\..*/\1/p; s/.*version "\([0-9]*\)".*/\1/p' |
        head -n 1
}

find_java() {
    for java in "${JAVA_HOME:+$JAVA_HOME/bin/java}" "$(command -v java || true)"; do
        [ -n "$java" ] && [ -x "$java" ] || continue
        version=$(java_version "$java")
        if [ "${version:-0}" -ge 17 ]; then
            home=$("$java" -XshowSettings:properties -version 2>&1 |
                sed -n 's/^ *java\.home = //p')
            echo "${home:-${java%/bin/java}}"
            return
        fi
        say "$java is Java ${version:-of no known version}; Spark needs 17 or later"
    done
    return 1
}

find_clang() {
    for clang in ${CLANG:-} clang clang-22 clang-19 clang-18 clang-17 clang-16 clang-15 clang-14; do
        echo 'int nothing;' | "$clang" -fsanitize=address,fuzzer-no-link -x c -c -o /dev/null - \
            2>/dev/null && command -v "$clang" && return
    done
    return 1
}

find_postgres() {
    initdb=$(command -v initdb || true)
    initdb=${initdb:+$(readlink -f "$initdb")}
    for folder in "${PG_BIN:-}" "${initdb%/*}" /usr/lib/postgresql/*/bin; do
        for program in initdb postgres psql pg_isready; do
            [ -x "$folder/$program" ] || continue 2
        done
        version=$("$folder/postgres" --version | sed 's/[^0-9]*\([0-9]*\).*/\1/')
        if [ "${version:-0}" -ge 13 ]; then
            echo "$folder"
            return
        fi
        say "$folder has PostgreSQL ${version:-of no known version}; 13 or later is needed"
    done
    return 1
}

find_chromium() {
    # Of some packages the program on PATH only says what to install: it has no version.
    for program in ${CHROMIUM:-} chromium-headless-shell chromium chromium-browser google-chrome; do
        "$program" --version 2>/dev/null | grep -q Chrom && command -v "$program" && return
    done
    return 1
}

find_tshark() {
    for program in ${TSHARK:-} tshark; do
        "$program" --version 2>/dev/null | grep -Eq '^TShark .* ([4-9]|[1-9][0-9])\.' &&
            command -v "$program" && return
    done
    return 1
}

case ${1:-} in
python)
    if ! command -v "${CC:-cc}" >/dev/null; then
        install "no C compiler (${CC:-cc})" gcc libc6-dev
    fi
    if ! find_python; then
        install "no Python >= 3.11 with venv and headers" python3 python3-venv python3-dev
        find_python || { say "no Python >= 3.11 among Debian's packages; set PYTHON"; exit 1; }
    fi
    ;;
java)
    if ! find_java; then
        install "no Java >= 17 by JAVA_HOME or on PATH" default-jre-headless
        unset JAVA_HOME
        find_java || { say "still no Java >= 17; set JAVA_HOME"; exit 1; }
    fi
    ;;
clang)
    if ! find_clang; then
        install "no clang for -fsanitize=address,fuzzer-no-link" clang
        find_clang || { say "still no clang that has it; set CLANG"; exit 1; }
    fi
    ;;
postgres)
    if ! find_postgres; then
        install "no PostgreSQL >= 13 by PG_BIN, on PATH or in /usr/lib/postgresql" postgresql
        find_postgres || { say "still no PostgreSQL >= 13; set PG_BIN"; exit 1; }
    fi
    ;;
chromium)
    if ! find_chromium; then
        install "no Chromium by CHROMIUM or on PATH" chromium-headless-shell
        find_chromium || { say "still no Chromium; set CHROMIUM"; exit 1; }
    fi
    ;;
tshark)
    if ! find_tshark; then
        install "no tshark >= 4 by TSHARK or on PATH" tshark
        find_tshark || { say "still no tshark >= 4; set TSHARK"; exit 1; }
    fi
    ;;
zsh | fish)
    if ! command -v "$1"; then
        install "no $1 on PATH" "$1"
        command -v "$1" || { say "still no $1 on PATH"; exit 1; }
    fi
    ;;
*)
    say "say 'python', 'java', 'clang', 'postgres', 'chromium', 'tshark', 'zsh' or 'fish'"
    exit 2
    ;;
esac
