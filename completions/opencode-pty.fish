# fish completion for opencode-pty(1): what an operator types. Install as
# /usr/local/share/fish/vendor_completions.d/opencode-pty.fish.

function __opencode_pty_role
    set -l words (commandline -opc)
    test (count $words) -ge 2; and contains -- $words[2] $argv
end

function __opencode_pty_no_role
    test (count (commandline -opc)) -eq 1
end

complete -c opencode-pty -f
complete -c opencode-pty -n __opencode_pty_no_role -a list -d 'the running sessions'
complete -c opencode-pty -n __opencode_pty_no_role -a selftest -d 'is this host ready, and does it hold'
complete -c opencode-pty -n __opencode_pty_no_role -a supervisor -d 'the root service'
complete -c opencode-pty -n __opencode_pty_no_role -a client -d 'sends one start frame with one directory'
complete -c opencode-pty -n __opencode_pty_no_role -a launcher -d "runs inside a session's unit"
complete -c opencode-pty -n __opencode_pty_no_role -a help -d 'a summary'
complete -c opencode-pty -n __opencode_pty_no_role -l help -d 'a summary'
complete -c opencode-pty -n __opencode_pty_no_role -l version -d 'name and version'

complete -c opencode-pty -n '__opencode_pty_role list selftest supervisor client launcher' -l help -d 'a summary'

complete -c opencode-pty -n '__opencode_pty_role list' -l json -d 'print one JSON object with raw numbers'
complete -c opencode-pty -n '__opencode_pty_role list' -l unit -x -d "the supervisor's unit, whose sessions are listed" \
    -a "(systemctl list-units --all --plain --no-legend --type=service 2>/dev/null | string split -f1 ' ')"
complete -c opencode-pty -n '__opencode_pty_role list' -l bus -x -d 'for tests: D-Bus address'
complete -c opencode-pty -n '__opencode_pty_role list' -l manager-pid -x \
    -d "for tests: pid that must own the service manager's name"

complete -c opencode-pty -n '__opencode_pty_role selftest' -l live \
    -d 'also start a private supervisor and try the escapes'
complete -c opencode-pty -n '__opencode_pty_role selftest' -l json -d 'print one JSON object instead of lines'
complete -c opencode-pty -n '__opencode_pty_role selftest' -l only -x -d 'only these checks or groups' \
    -a "(__fish_append , (opencode-pty selftest --list-checks 2>/dev/null | string split \t -f1,2 | sort -u))"
complete -c opencode-pty -n '__opencode_pty_role selftest' -l list-checks -d 'print every check and make none'
complete -c opencode-pty -n '__opencode_pty_role selftest' -l account -x \
    -d 'account that sessions and the server run as' -a '(__fish_complete_users)'
