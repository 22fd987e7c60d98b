# bash completion for opencode-pty(1): what an operator types. Install as
# /usr/local/share/bash-completion/completions/opencode-pty, or source it.

_opencode_pty()
{
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} words=
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        words='list selftest supervisor client launcher help --help --version'
    else
        case ${COMP_WORDS[1]}:$previous in
            list:--unit)
                words=$(systemctl list-units --all --plain --no-legend --type=service 2>/dev/null | cut -d' ' -f1) ;;
            list:--bus | list:--manager-pid) ;;
            selftest:--only)
                words=$("${COMP_WORDS[0]}" selftest --list-checks 2>/dev/null | cut -f1-2 | tr '\t' '\n' | sort -u) ;;
            selftest:--account)
                words=$(compgen -u) ;;
            list:*)
                words='--json --unit --bus --manager-pid --help' ;;
            selftest:*)
                words='--live --json --only --list-checks --account --help' ;;
            supervisor:* | client:* | launcher:*)
                words='--help' ;;
        esac
    fi
    local word
    while read -r word; do
        COMPREPLY+=("$word")
    done < <(compgen -W "$words" -- "$current")
}

complete -F _opencode_pty opencode-pty
